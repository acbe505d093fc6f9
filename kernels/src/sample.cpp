// One row of logits at a time: a unit of work for one thread, so neither batch nor threads touch a bit.
//
//   logits ─load, mask─► x ─edit─► block maxima ─► M          x / M / T give z = (x - M) / T, weight exp(z)
//                                     │
//        temperature 0: first id with M     else: a lowest key from top-k and top-p, a lowest z from min-p
//                                                  └─► weights of what is kept, block sums ─► draw in id order
//
// A block is 64 ids. What a block's maximum rules out is never looked at again, so a peaked row costs little more than its
// masking; a flat one (top-p over 49152 like ids) costs a histogram of z instead of a sort.
#include "sample.h"

// GCC 12's own AVX-512 headers pass undefined vectors on purpose (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include <cmath>

#include "philox.h"
#include "sample_select.h"
#include "simd.h"

namespace phloem::PHLOEM_NS {

namespace {

constexpr int kBlock = kSampleBlock;
constexpr float kMinZ = -87.0f;  // weight 0 below
constexpr float kMaxEdited = 1e30f;
constexpr double kMinTemperature = 1.17549435e-38, kMinLogprob = -3.40282347e38;

PHLOEM_INLINE vf minus_inf() { return as_f(set1_i((int32_t)0xff800000u)); }
PHLOEM_INLINE vi lanes() {
  vi v;
  for (int i = 0; i < W; i++) v[i] = i;
  return v;
}
PHLOEM_INLINE float reduce_max(vf v) {
#if defined(PHLOEM_AVX512)
  return _mm512_reduce_max_ps((__m512)v);
#elif defined(PHLOEM_AVX2)
  __m128 m = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
#else
  return hmax(v);
#endif
}
PHLOEM_INLINE float reduce_add(vf v) {
#if defined(PHLOEM_AVX512)
  return _mm512_reduce_add_ps((__m512)v);
#elif defined(PHLOEM_AVX2)
  __m128 m = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  m = _mm_add_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_add_ss(m, _mm_movehdup_ps(m)));
#else
  return hsum(v);
#endif
}
PHLOEM_INLINE uint32_t bits_of(vi mask) {
#if defined(PHLOEM_AVX512)
  return _mm512_movepi32_mask((__m512i)mask);
#elif defined(PHLOEM_AVX2)
  return (uint32_t)_mm256_movemask_ps((__m256)mask);
#else
  uint32_t bits = 0;
  for (int i = 0; i < W; i++) bits |= (uint32_t)(mask[i] & 1) << i;
  return bits;
#endif
}
// Lanes whose bit is 0 become -inf.
PHLOEM_INLINE vf mask_lanes(vf v, uint32_t bits) {
#if defined(PHLOEM_AVX512)
  return (vf)_mm512_mask_mov_ps((__m512)minus_inf(), (__mmask16)bits, (__m512)v);
#else
  const vi one = set1_i(1) << lanes();
  return select((set1_i((int32_t)bits) & one) == one, v, minus_inf());
#endif
}
PHLOEM_INLINE bool any_nan(vf v) { return bits_of(v != v) != 0; }

// ids of block b that the masks allow, bit i: id b * 64 + i.
uint64_t legal_bits(const uint32_t* mask, const uint32_t* allowed, int vocab, int b) {
  const int words = (vocab + 31) / 32, left = vocab - b * kBlock;
  auto word = [&](const uint32_t* row) {
    return (uint64_t)row[2 * b] | (2 * b + 1 < words ? (uint64_t)row[2 * b + 1] << 32 : 0);
  };
  uint64_t bits = left >= kBlock ? ~0ull : (1ull << left) - 1;
  if (mask != nullptr) bits &= word(mask);
  if (allowed != nullptr) bits &= word(allowed);
  return bits;
}

// Reads a block, puts its masked values to `out` if that is wanted, returns the largest. `sick` turns NaN where a value, masked
// or not, is not finite.
template <bool kStore>
PHLOEM_INLINE float load_block(const float* x, int left, uint64_t bits, float* out, vf& sick) {
  vf top = minus_inf();
  if (bits == ~0ull) {
    PHLOEM_UNROLL
    for (int i = 0; i < kBlock; i += W) {
      const vf v = load(x + i);
      sick = fma(v, zero(), sick);
      if (kStore) store(out + i, v);
      top = max(top, v);
    }
    return reduce_max(top);
  }
  for (int i = 0; i < kBlock; i += W) {
    const int n = left - i;
    vf v = n >= W ? load(x + i) : n > 0 ? load_part(x + i, n) : zero();
    sick = fma(v, zero(), sick);
    v = mask_lanes(v, (uint32_t)(bits >> i));
    if (kStore) store(out + i, v);
    top = max(top, v);
  }
  return reduce_max(top);
}

struct Row {
  const float* logits;
  int width, vocab, blocks;
  SampleScratch s;
  const uint32_t *mask, *allowed;
  float max = 0, inverse_t = 0;

  float z_of(float x) const { return (x - max) * inverse_t; }
  vf z_of(vf x) const { return (x - set1(max)) * set1(inverse_t); }

  // Block maxima of the masked logits, and with kStore the masked logits. False: a logit that must be finite is not.
  template <bool kStore>
  bool load() {
    vf sick = zero();
    for (int b = 0; b < blocks; b++) {
      const uint64_t bits = legal_bits(mask, allowed, vocab, b);
      s.block_max[b] = load_block<kStore>(logits + b * kBlock, vocab - b * kBlock, bits, s.x + b * kBlock, sick);
    }
    bool good = !any_nan(sick);
    for (int i = vocab; i < width; i++) good &= logits[i] < INFINITY;  // -inf is a model that masks its padding
    return good;
  }

  void find_block_maxima() {
    for (int b = 0; b < blocks; b++) {
      vf top = minus_inf();
      for (int i = 0; i < kBlock; i += W) top = PHLOEM_NS::max(top, PHLOEM_NS::load(s.x + b * kBlock + i));
      s.block_max[b] = reduce_max(top);
    }
  }
  float find_max() const {
    float top = -INFINITY;
    for (int b = 0; b < blocks; b++) top = s.block_max[b] > top ? s.block_max[b] : top;
    return top;
  }

  bool legal(int32_t id) const { return id >= 0 && id < vocab && s.x[id] != -INFINITY; }
  static float clamped(double v) {
    return (float)(v > kMaxEdited ? (double)kMaxEdited : v < -kMaxEdited ? -(double)kMaxEdited : v);
  }
  void edit(const phloem_sample_row& r) {
    for (int i = 0; i < r.num_penalty; i++) {
      const int32_t id = r.penalty_ids[i];
      if (!legal(id)) continue;
      float v = s.x[id];
      if (r.repetition_penalty != 1.0f) v = v > 0 ? v / r.repetition_penalty : v * r.repetition_penalty;
      const double times = r.penalty_times[i];
      s.x[id] = clamped((double)v - (r.frequency_penalty * times + r.presence_penalty * (times > 0 ? 1.0 : 0.0)));
    }
    for (int i = 0; i < r.num_bias; i++)
      if (legal(r.bias_ids[i])) s.x[r.bias_ids[i]] = clamped((double)s.x[r.bias_ids[i]] + r.bias_values[i]);
  }

  // Calls f(id, x) for every legal id with x >= least, in id order; what `maxima` rules out is not read.
  template <class F>
  void each_from(const float* x, const float* maxima, float least, F&& f) const {
    for (int b = 0; b < blocks; b++) {
      if (maxima[b] < least || maxima[b] == -INFINITY) continue;
      for (int i = b * kBlock; i < b * kBlock + kBlock; i += W) {
        const vf v = i + W <= vocab ? PHLOEM_NS::load(x + i) : i < vocab ? load_part(x + i, vocab - i) : minus_inf();
        uint32_t bits = bits_of((v >= set1(least)) & (v > minus_inf()));
        if (i + W > vocab) bits &= i < vocab ? (1u << (vocab - i)) - 1 : 0;
        for (; bits != 0; bits &= bits - 1) {
          const int id = i + __builtin_ctz(bits);
          f(id, x[id]);
        }
      }
    }
  }

  // A value that at least n ids reach, and not many more: the n-th largest block maximum, or for many ids a guess from every
  // 16th that is then checked. -inf where there is none.
  float bound(const float* x, const float* maxima, int n) const {
    if (n <= PHLOEM_MAX_TOP && n <= blocks) {
      Best best(n);
      for (int b = 0; b < blocks; b++) best.offer(key_of(maxima[b], b));
      return best.last_value();
    }
    int m = 0;
    if (n <= blocks / 2) {
      for (; m < blocks; m++) s.items[m] = {key_of(maxima[m], m), 0.0f};
      return value_of(select_items(s.items, m, n));
    }
    for (int i = 0; i < vocab; i += 16)
      if (x[i] > -INFINITY) s.items[m++] = {key_of(x[i], i), 0.0f};
    const int rank = n / 16 + n / 128 + 16;
    if (rank >= m) return -INFINITY;
    const float guess = value_of(select_items(s.items, m, rank));
    vi found = set1_i(0);
    for (int i = 0; i + W <= vocab; i += W) found += PHLOEM_NS::load(x + i) >= set1(guess);  // minus 1 a hit
    int hits = 0;
    for (int i = 0; i < W; i++) hits -= found[i];
    return hits >= n ? guess : -INFINITY;
  }
  Best best_of(const float* x, const float* maxima, int n) const {
    Best best(n);
    if (n > 0) each_from(x, maxima, bound(x, maxima, n), [&](int id, float v) { best.offer(key_of(v, id)); });
    return best;
  }

  // Weights of everything legal; their sum.
  double weigh_all() {
    double total = 0;
    for (int b = 0; b < blocks; b++) {
      s.block_sum[b] = 0;
      if (!(z_of(s.block_max[b]) >= kMinZ)) continue;
      vf sum = zero();
      PHLOEM_UNROLL
      for (int i = b * kBlock; i < b * kBlock + kBlock; i += W) {
        const vf z = z_of(PHLOEM_NS::load(s.x + i));
        const vf e = select(z >= set1(kMinZ), exp(z), zero());
        store(s.e + i, e);
        sum += e;
      }
      total += s.block_sum[b] = (double)reduce_add(sum);
    }
    return total;
  }

  // top-k: the key of the k-th; with top-p < 1 of the last that is needed to reach its share of those k.
  uint64_t lowest_of_k(int k, double top_p) {
    int n = 0;
    each_from(s.x, s.block_max, bound(s.x, s.block_max, k), [&](int id, float v) { s.items[n++] = {key_of(v, id), 0.0f}; });
    if (k < n) select_items(s.items, n, k);
    else k = n;
    uint64_t lowest = s.items[0].key;
    for (int i = 1; i < k; i++) lowest = s.items[i].key < lowest ? s.items[i].key : lowest;
    if (!(top_p < 1.0)) return lowest;
    double total = 0;
    for (int i = 0; i < k; i += W) {
      const int m = k - i < W ? k - i : W;
      alignas(64) float t[W] = {};
      for (int j = 0; j < m; j++) t[j] = value_of(s.items[i + j].key);
      const vf z = z_of(PHLOEM_NS::load(t));
      store(t, select(z >= set1(kMinZ), exp(z), zero()));
      for (int j = 0; j < m; j++) total += (double)(s.items[i + j].weight = t[j]);
    }
    return select_mass(s.items, k, top_p * total);
  }

  // top-p alone, after weigh_all. Ids lighter than `least` weigh less than (1 - p) of the total all together, so the id that
  // crosses p is among the others. A histogram of z finds its bucket; only that bucket's ids are put into order.
  uint64_t lowest_of_p(double top_p, double total) {
    const double target = top_p * total;
    const float least = (float)((1.0 - top_p) * total / vocab);
    // Two histograms, for even and odd lanes: neighbours often share a bucket, and an add would wait for the one before.
    double* const h[2] = {s.buckets, s.buckets + kSampleBuckets};
    for (int i = 0; i < 2 * kSampleBuckets; i++) s.buckets[i] = 0;
    for (int b = 0; b < blocks; b++) {
      if (s.block_sum[b] == 0 || s.block_sum[b] < least) continue;
      for (int i = b * kBlock; i < b * kBlock + kBlock; i += W) {
        const vf e = PHLOEM_NS::load(s.e + i);
        const vi in = (e >= set1(least)) & (e > zero());
        uint32_t bits = bits_of(in);
        if (__builtin_popcount(bits) > W / 4) {
          alignas(64) float weight[W];
          alignas(64) int32_t at[W];
          store(weight, select(in, e, zero()));
          const vf t = z_of(PHLOEM_NS::load(s.x + i)) * set1(-64.0f);
          store_i(at, __builtin_convertvector(select(in, t, zero()), vi));
          PHLOEM_UNROLL
          for (int j = 0; j < W; j++) h[j & 1][at[j]] += (double)weight[j];
        } else {
          for (; bits != 0; bits &= bits - 1) {
            const int id = i + __builtin_ctz(bits);
            h[id & 1][(int)(z_of(s.x[id]) * -64.0f)] += (double)s.e[id];
          }
        }
      }
    }
    int bucket = 0, last = 0;
    double before = 0;
    for (double running = 0; bucket < kSampleBuckets; bucket++) {
      const double here = h[0][bucket] + h[1][bucket];
      if (here == 0) continue;
      last = bucket;
      before = running;
      running += here;
      if (running >= target) break;
    }
    int n = 0;
    const vf low = set1((float)last), high = set1((float)last + 1.0f);
    for (int b = 0; b < blocks; b++) {
      if (s.block_sum[b] == 0 || s.block_sum[b] < least || z_of(s.block_max[b]) * -64.0f >= (float)last + 1.0f) continue;
      for (int i = b * kBlock; i < b * kBlock + kBlock; i += W) {
        const vf e = PHLOEM_NS::load(s.e + i), t = z_of(PHLOEM_NS::load(s.x + i)) * set1(-64.0f);
        const vi in = (t >= low) & (t < high) & (e >= set1(least)) & (e > zero());
        for (uint32_t bits = bits_of(in); bits != 0; bits &= bits - 1) {
          const int id = i + __builtin_ctz(bits);
          s.items[n++] = {key_of(s.x[id], id), s.e[id]};
        }
      }
    }
    return select_mass(s.items, n, target - before);
  }

  // Weights of ids from `lowest` on whose z is at least `floor`, 0 for the others; block sums; their sum.
  double weigh_kept(uint64_t lowest, float floor) {
    const float x_low = value_of(lowest);
    const vi id_low = set1_i(id_of(lowest));
    double total = 0;
    for (int b = 0; b < blocks; b++) {
      s.block_sum[b] = 0;
      if (s.block_max[b] < x_low || !(z_of(s.block_max[b]) >= floor)) continue;
      vf sum = zero();
      for (int i = b * kBlock; i < b * kBlock + kBlock; i += W) {
        const vf x = PHLOEM_NS::load(s.x + i), z = z_of(x);
        const vi kept = (x > set1(x_low)) | ((x == set1(x_low)) & (lanes() + set1_i(i) <= id_low));
        const vf e = select(kept & (z >= set1(floor)), exp(z), zero());
        store(s.e + i, e);
        sum += e;
      }
      total += s.block_sum[b] = (double)reduce_add(sum);
    }
    return total;
  }

  // Weights of all raw logits, masked ones and padding too, against their own maximum; added up as weigh_kept adds.
  double weigh_raw(float* top) const {
    vf t = minus_inf();
    for (int i = 0; i < width; i += W) t = PHLOEM_NS::max(t, raw(i));
    *top = reduce_max(t);
    double total = 0;
    for (int b = 0; b < width; b += kBlock) {
      vf sum = zero();
      for (int i = b; i < b + kBlock && i < width; i += W) {
        const vf z = (raw(i) - set1(*top)) * set1(inverse_t);
        sum += select(z >= set1(kMinZ), exp(z), zero());
      }
      total += (double)reduce_add(sum);
    }
    return total;
  }
  vf raw(int i) const {
    if (i + W <= width) return PHLOEM_NS::load(logits + i);
    return select(lanes() < set1_i(width - i), load_part(logits + i, width - i), minus_inf());
  }
  // log-softmax(logits / T) of the token, less `sampled`.
  float mass(int token, double temperature, double total) const {
    float top;
    const double full = weigh_raw(&top);
    const double edit = (double)logits[token] - (double)s.x[token];
    return (float)((edit + ((double)max - (double)top)) / temperature + (std::log(total) - std::log(full)));
  }

  // What has a weight, after weigh_kept.
  void write_kept(uint32_t* bits) const {
    for (int i = 0; i < (vocab + 31) / 32; i++) bits[i] = 0;
    for (int b = 0; b < blocks; b++) {
      if (s.block_sum[b] == 0) continue;
      for (int id = b * kBlock; id < b * kBlock + kBlock && id < vocab; id++)
        if (s.e[id] > 0) bits[id / 32] |= 1u << (id % 32);
    }
  }

  // The first id whose running weight exceeds u * total.
  int draw(double u, double total) const {
    const double target = u * total;
    double before = 0, running = 0;
    int last = 0;
    for (int b = 0; b < blocks && running <= target; b++) {
      if (s.block_sum[b] == 0) continue;
      last = b;
      before = running;
      running += s.block_sum[b];
    }
    running = before;
    int token = -1;
    for (int id = last * kBlock; id < last * kBlock + kBlock; id++) {
      if (s.e[id] == 0) continue;
      token = id;  // the last with weight, if rounding denies all of them
      running += (double)s.e[id];
      if (running > target) break;
    }
    return token;
  }

  int argmax() const {
    int b = 0;
    while (s.block_max[b] != max) b++;
    float t[kBlock];
    vf sick = zero();
    const float* x = s.x + b * kBlock;
    if (!stored) {
      load_block<true>(logits + b * kBlock, vocab - b * kBlock, legal_bits(mask, allowed, vocab, b), t, sick);
      x = t;
    }
    int i = 0;
    while (x[i] != max) i++;
    return b * kBlock + i;
  }
  bool stored = false;

  // log(sum(exp(logits))) over the whole width, in two parts whose sum it is: the maximum, and the rest.
  void log_sum_exp(float* top, double* rest) const {
    vf t = minus_inf();
    const int whole = width / W * W;
    for (int i = 0; i < whole; i += W) t = PHLOEM_NS::max(t, PHLOEM_NS::load(logits + i));
    float m = reduce_max(t);
    for (int i = whole; i < width; i++) m = logits[i] > m ? logits[i] : m;
    double total = 0;
    for (int b = 0; b < width; b += kBlock) {
      vf sum = zero();
      if (b + kBlock <= width) {
        PHLOEM_UNROLL
        for (int i = b; i < b + kBlock; i += W) sum += exp(PHLOEM_NS::load(logits + i) - set1(m));
      } else {
        for (int i = b; i < width; i += W) {
          const int n = width - i < W ? width - i : W;
          sum += select(lanes() < set1_i(n), exp(load_part(logits + i, n) - set1(m)), zero());
        }
      }
      total += (double)reduce_add(sum);
    }
    *top = m;
    *rest = std::log(total);
  }
};

float rounded(double logprob) { return (float)(logprob > 0 ? 0.0 : logprob < kMinLogprob ? kMinLogprob : logprob); }

void model_logprobs(Row& row, int token, int top, const float* maxima, phloem_sample_result& out) {
  float high;
  double rest;
  row.log_sum_exp(&high, &rest);
  out.model = rounded((double)row.logits[token] - (double)high - rest);
  const Best best = row.best_of(row.logits, maxima, top);
  out.num_top = best.count;
  for (int i = 0; i < best.count; i++) {
    out.top_ids[i] = id_of(best.keys[i]);
    out.top_logprobs[i] = rounded((double)value_of(best.keys[i]) - (double)high - rest);
  }
}

void sample_row(const SampleArgs& args, const phloem_sample_row& r, const SampleScratch& scratch, phloem_sample_result& out) {
  out.token = -1;
  out.status = PHLOEM_DRAWN;
  out.model = out.sampled = out.mass = 0;
  out.num_top = 0;
  Row row;
  row.logits = args.logits + r.logits_row * args.stride;
  row.width = args.width;
  row.vocab = args.vocab;
  row.blocks = (args.vocab + kBlock - 1) / kBlock;
  row.s = scratch;
  row.mask = r.mask;
  row.allowed = r.allowed;
  const bool edits = r.num_penalty + r.num_bias + r.num_block > 0;
  row.stored = edits || r.temperature != 0;
  if (!(row.stored ? row.load<true>() : row.load<false>())) {
    out.status = PHLOEM_NOT_FINITE;
    return;
  }
  row.max = row.find_max();
  if (r.num_block > 0 && row.max != -INFINITY) {
    for (int i = 0; i < r.num_block; i++)
      if (r.block_ids[i] >= 0 && r.block_ids[i] < row.vocab) row.s.x[r.block_ids[i]] = -INFINITY;
    row.find_block_maxima();
    row.max = row.find_max();
    if (row.max == -INFINITY && r.mask != nullptr) {  // a grammar at its end outranks min_tokens
      row.load<true>();
      row.max = row.find_max();
    }
  }
  if (row.max == -INFINITY) {
    out.status = PHLOEM_DEAD_END;
    return;
  }
  if (r.num_penalty + r.num_bias > 0) {
    row.edit(r);
    row.find_block_maxima();
    row.max = row.find_max();
  }

  const bool sampled = (r.logprobs & PHLOEM_LOGPROB_SAMPLED) != 0, model = (r.logprobs & PHLOEM_LOGPROB_MODEL) != 0;
  if (r.temperature == 0) {
    out.token = row.argmax();
    if (r.kept != nullptr) {
      for (int i = 0; i < (row.vocab + 31) / 32; i++) r.kept[i] = 0;
      r.kept[out.token / 32] = 1u << (out.token % 32);
    }
    if (sampled && !model && r.top > 0) {
      out.num_top = 1;
      out.top_ids[0] = out.token;
      out.top_logprobs[0] = 0;
    }
  } else {
    const double temperature = r.temperature > kMinTemperature ? r.temperature : kMinTemperature;
    row.inverse_t = (float)(1.0 / temperature);
    float floor = kMinZ;
    if (r.min_p > 0 && (float)std::log(r.min_p) > floor) floor = (float)std::log(r.min_p);
    uint64_t lowest = key_of(-INFINITY, 0x7fffffff);
    if (r.top_k > 0 && r.top_k < row.vocab) lowest = row.lowest_of_k(r.top_k, r.top_p);
    else if (r.top_p < 1.0) lowest = row.lowest_of_p(r.top_p, row.weigh_all());
    const double total = row.weigh_kept(lowest, floor);
    out.token = row.draw(philox_uniform(r.seed, r.sample, r.position), total);
    if (r.kept != nullptr) row.write_kept(r.kept);
    if ((r.logprobs & PHLOEM_LOGPROB_MASS) != 0) out.mass = row.mass(out.token, temperature, total);
    if (sampled) {
      const double rest = std::log(total);
      auto logprob = [&](float x) { return rounded(((double)x - (double)row.max) / temperature - rest); };
      out.sampled = logprob(row.s.x[out.token]);
      if (!model) {
        const Best best = row.best_of(row.s.x, row.s.block_max, r.top);
        for (int i = 0; i < best.count; i++) {
          const float x = value_of(best.keys[i]);
          if (best.keys[i] < lowest || !(row.z_of(x) >= floor)) break;
          out.top_ids[i] = id_of(best.keys[i]);
          out.top_logprobs[i] = logprob(x);
          out.num_top = i + 1;
        }
      }
    }
  }
  if (!model) return;
  if (r.top > 0 && (edits || r.mask != nullptr || r.allowed != nullptr)) {  // the alternatives are of the raw logits
    row.mask = row.allowed = nullptr;
    row.load<false>();
  }
  model_logprobs(row, out.token, r.top, row.s.block_max, out);
}

// `sampled` and `mass` of the target, as the draw from what the mask leaves had them.
void score_support(Row& row, const phloem_score_row& r, phloem_sample_result& out) {
  row.mask = r.mask;
  if (!row.load<true>()) return;  // the caller tells
  row.max = row.find_max();
  if (r.target >= row.vocab || row.s.x[r.target] == -INFINITY) {
    out.sampled = (float)kMinLogprob;
    return;
  }
  const double temperature = r.temperature > kMinTemperature ? r.temperature : kMinTemperature;
  row.inverse_t = (float)(1.0 / temperature);
  const double total = row.weigh_kept(key_of(-INFINITY, 0x7fffffff), kMinZ);
  out.sampled = rounded(((double)row.s.x[r.target] - (double)row.max) / temperature - std::log(total));
  if ((r.logprobs & PHLOEM_LOGPROB_MASS) != 0) out.mass = row.mass(r.target, temperature, total);
}

void score_row(const SampleArgs& args, const phloem_score_row& r, const SampleScratch& scratch, phloem_sample_result& out) {
  out.token = r.target;
  out.status = PHLOEM_DRAWN;
  out.model = out.sampled = out.mass = 0;
  out.num_top = 0;
  Row row;
  row.logits = args.logits + r.logits_row * args.stride;
  row.width = args.width;
  row.vocab = args.vocab;
  row.blocks = (args.vocab + kBlock - 1) / kBlock;
  row.s = scratch;
  row.mask = row.allowed = nullptr;
  if (r.logprobs != 0 && r.temperature != 0) score_support(row, r, out);
  row.mask = nullptr;
  if (!row.load<false>()) {
    out.status = PHLOEM_NOT_FINITE;
    return;
  }
  model_logprobs(row, r.target, r.top, row.s.block_max, out);
}

}  // namespace

void sample_run(const SampleArgs& args, Spmd& spmd) {
  SampleScratch scratch;
  SampleScratch::lay_out(args.vocab, spmd.scratch, &scratch);
  for (int i = spmd.thread; i < args.num_rows; i += spmd.threads) sample_row(args, args.rows[i], scratch, args.results[i]);
}

void score_run(const SampleArgs& args, Spmd& spmd) {
  SampleScratch scratch;
  SampleScratch::lay_out(args.vocab, spmd.scratch, &scratch);
  for (int i = spmd.thread; i < args.num_rows; i += spmd.threads) score_row(args, args.scores[i], scratch, args.results[i]);
}

}  // namespace phloem::PHLOEM_NS

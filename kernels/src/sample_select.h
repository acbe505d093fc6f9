// Order and selection without a sort. Items are ordered by key: value falling, then id rising, so no two are equal.
//
// Own loops in place of std::nth_element: sources compiled once per variant hold no std:: templates (variants.h).
#pragma once

#include <cstdint>
#include <cstring>

#include "sample.h"

namespace phloem::PHLOEM_NS {

static inline uint64_t key_of(float value, int32_t id) {
  value += 0.0f;  // -0 and +0 are equal
  uint32_t u;
  std::memcpy(&u, &value, 4);
  u = u >> 31 ? ~u : u | 0x80000000u;
  return (uint64_t)u << 32 | (0xffffffffu - (uint32_t)id);
}
static inline float value_of(uint64_t key) {
  uint32_t u = (uint32_t)(key >> 32);
  u = u >> 31 ? u & 0x7fffffffu : ~u;
  float value;
  std::memcpy(&value, &u, 4);
  return value;
}
static inline int32_t id_of(uint64_t key) { return (int32_t)(0xffffffffu - (uint32_t)key); }

static inline void swap_items(SampleItem& a, SampleItem& b) {
  const SampleItem t = a;
  a = b;
  b = t;
}

static inline void sort_items(SampleItem* items, int n) {  // a few
  for (int i = 1; i < n; i++) {
    const SampleItem item = items[i];
    int j = i;
    for (; j > 0 && items[j - 1].key < item.key; j--) items[j] = items[j - 1];
    items[j] = item;
  }
}

// [lo, hi) becomes larger keys, then smaller ones; returns where the smaller begin: lo < result < hi. hi - lo >= 3.
static inline int partition_items(SampleItem* items, int lo, int hi) {
  uint64_t a = items[lo].key, b = items[lo + (hi - lo) / 2].key, c = items[hi - 1].key;
  // The median of three different keys: one of them is above or equal, one below, so neither side is empty.
  const uint64_t low = a < b ? a : b, high = a < b ? b : a;
  const uint64_t pivot = c < low ? low : c > high ? high : c;
  int i = lo, j = hi - 1;
  for (;;) {
    while (items[i].key >= pivot) i++;
    while (items[j].key < pivot) j--;
    if (i > j) return i;
    swap_items(items[i], items[j]);
    i++;
    j--;
  }
}

// Moves the k largest to the front, in no order, 1 <= k <= n; returns the k-th largest key.
static inline uint64_t select_items(SampleItem* items, int n, int k) {
  int lo = 0, hi = n;
  while (hi - lo > 24) {
    const int mid = partition_items(items, lo, hi);
    if (k <= mid) hi = mid;
    else lo = mid;
  }
  sort_items(items + lo, hi - lo);
  return items[k - 1].key;
}

// The key at which the running weight, likeliest first, reaches `target`; the smallest key if it never does. n >= 1.
static inline uint64_t select_mass(SampleItem* items, int n, double target) {
  int lo = 0, hi = n;
  double before = 0;
  while (hi - lo > 24) {
    const int mid = partition_items(items, lo, hi);
    double upper = 0;
    for (int i = lo; i < mid; i++) upper += (double)items[i].weight;
    if (before + upper >= target) hi = mid;
    else {
      before += upper;
      lo = mid;
    }
  }
  sort_items(items + lo, hi - lo);
  for (int i = lo; i < hi; i++) {
    before += (double)items[i].weight;
    if (before >= target) return items[i].key;
  }
  return items[hi - 1].key;
}

// The best so far, sorted: the n largest keys of all that were offered.
struct Best {
  uint64_t keys[PHLOEM_MAX_TOP];
  int limit, count;

  explicit Best(int n) : limit(n), count(0) {}
  void offer(uint64_t key) {
    if (limit == 0 || (count == limit && key < keys[count - 1])) return;
    int j = count < limit ? count++ : count - 1;
    for (; j > 0 && keys[j - 1] < key; j--) keys[j] = keys[j - 1];
    keys[j] = key;
  }
  float last_value() const { return value_of(keys[count - 1]); }
};

}  // namespace phloem::PHLOEM_NS

/* From logits to tokens: hard masks, penalties, bias, temperature, top-k, top-p, min-p, draw, logprobs; one call a batch.
 *
 * What each step means, and in which order, is the header of python/runtime/executor/sampler.py; this is its fast twin. A row's
 * result depends on its own logits and options alone: not on the batch, the threads or the calls before. */
#ifndef PHLOEM_SAMPLE_H
#define PHLOEM_SAMPLE_H

#include "phloem.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { PHLOEM_MAX_TOP = 20 };
enum { PHLOEM_LOGPROB_MODEL = 1, PHLOEM_LOGPROB_SAMPLED = 2, PHLOEM_LOGPROB_MASS = 4 }; /* bits; with the model's, so are the alternatives */
enum { PHLOEM_DRAWN = 0, PHLOEM_NOT_FINITE = 1, PHLOEM_DEAD_END = 2 };

/* One draw. Ids outside the vocabulary, in any list, name nothing. A list of length 0 may be NULL. */
typedef struct phloem_sample_row {
  const uint32_t* mask;         /* bit t: token t is legal; ceil(vocab / 32) words, or NULL: all are */
  const uint32_t* allowed;      /* the same for allowed_token_ids */
  const int32_t* penalty_ids;   /* [num_penalty] ids of prompt and output, each once */
  const int32_t* penalty_times; /* [num_penalty] how often the output has them */
  const int32_t* bias_ids;      /* [num_bias] each once */
  const double* bias_values;    /* [num_bias] */
  const int32_t* block_ids;     /* [num_block] masked besides; without effect where `mask` then leaves nothing */
  uint32_t* kept;               /* written: bit t, token t could be drawn; ceil(vocab / 32) words, or NULL: not wanted */
  double temperature;           /* 0: argmax, the lowest id on ties */
  double top_p;                 /* (0, 1]; 1 is off */
  double min_p;                 /* [0, 1]; 0 is off */
  double frequency_penalty;
  double presence_penalty;
  uint64_t seed, sample, position; /* the draw's randomness: src/philox.h */
  float repetition_penalty;        /* 1 is off */
  int32_t top_k;                   /* 0 is off */
  int32_t num_penalty;
  int32_t num_bias;
  int32_t num_block;
  int32_t logits_row;
  int32_t logprobs; /* bits PHLOEM_LOGPROB_* */
  int32_t top;      /* alternatives, 0 .. PHLOEM_MAX_TOP */
} phloem_sample_row;

typedef struct phloem_sample_result {
  int32_t token;  /* -1 unless status is PHLOEM_DRAWN */
  int32_t status; /* PHLOEM_DRAWN, PHLOEM_NOT_FINITE or PHLOEM_DEAD_END */
  float model;    /* logprobs asked for, else 0 */
  float sampled;
  float mass;     /* log-softmax of the raw logits / temperature at the token, less `sampled`: exactly 0 if nothing was cut */
  int32_t num_top;
  int32_t top_ids[PHLOEM_MAX_TOP]; /* best first, the lower id first among equals */
  float top_logprobs[PHLOEM_MAX_TOP];
} phloem_sample_result;

typedef struct phloem_score_row {
  const uint32_t* mask; /* for `sampled` and `mass`: what could be drawn, ceil(vocab / 32) words; NULL: the whole vocabulary */
  double temperature;   /* for them; 0: both are 0 */
  int32_t logits_row;
  int32_t target; /* 0 .. width - 1 */
  int32_t top;
  int32_t logprobs; /* PHLOEM_LOGPROB_SAMPLED and PHLOEM_LOGPROB_MASS, or 0; the model's is always given */
} phloem_score_row;

/* logits: num_logits rows of `width` floats, `stride` floats apart; tokens 0 .. vocab - 1 of them may be drawn. */
PHLOEM_API int phloem_sample(phloem_context* context, const float* logits, int64_t stride, int32_t num_logits, int32_t width,
                             int32_t vocab, const phloem_sample_row* rows, int32_t num_rows, phloem_sample_result* results);
/* Logprobs of given tokens: `model` and the alternatives of each result, `token` = target. Under a mask that is what a draw
 * kept, `sampled` and `mass` are that draw's, bit for bit. A target that the mask excludes has the lowest float as `sampled`. */
PHLOEM_API int phloem_score(phloem_context* context, const float* logits, int64_t stride, int32_t num_logits, int32_t width,
                            int32_t vocab, const phloem_score_row* rows, int32_t num_rows, phloem_sample_result* results);
/* The uniform number behind a draw, for tests of its equality with Python's. */
PHLOEM_API double phloem_uniform(uint64_t seed, uint64_t sample, uint64_t position);

#ifdef __cplusplus
}
#endif
#endif

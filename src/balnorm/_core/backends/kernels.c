/* The closed form on a CPU, for which torch would need dozens of small calls and passes.

   This file needs no header of torch. A call gets tensors, and one of the structs below: what cpu.py worked out from
   shapes and types, and what it expects of each tensor. find() compares the tensor with that and returns its memory;
   nothing else does. Tensors are read through functions of torch's stable C interface, which balnorm_use_torch() gets.
   Threads are torch's own, through the address that balnorm_use_threads() gets. Work is divided by its size alone,
   never by the number of threads, so results are the same, bit for bit, whatever the threads do.

   The symbols are those of method.py: mean mu and mass a of the input, shares p, contribution c, v = (w - mean) / c. A
   weight is a matrix with a row for each output kernel; a row holds taps x inputs ("last", the order of channels_last)
   or inputs x taps. Statistics are always inputs x taps, with one tap where all taps share them.

   Only sums marked with "omp simd" may be reordered (-fopenmp-simd, which needs no OpenMP): everything else is computed
   as it is written, so that nothing overflows on the way. The file includes itself, once for each pair of types: REAL,
   in which everything is computed, and SAMPLE, which is that of the convolution: of samples, their gradient, and the
   effective weight. */

#ifndef REAL

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef void (*body_t)(int64_t, int64_t, void *);
typedef int32_t (*parallel_for_t)(int64_t, int64_t, int64_t, body_t, void *);

static int32_t one_thread(int64_t begin, int64_t end, int64_t grain, body_t body, void *context) {
  (void)grain;
  body(begin, end, context);
  return 0;
}
static parallel_for_t parallel_for = one_thread;

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* One binary for old and new processors, where compiler and system can choose between versions of a function. */
#ifdef BALNORM_CLONES
#define FAST __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FAST
#endif

/* Goes up with every change of what the structs below hold or mean, here and in cpu.py. */
EXPORT int balnorm_interface(void) { return 7; }

EXPORT void balnorm_use_threads(parallel_for_t address) { parallel_for = address; }

enum { WORTH_A_THREAD = 16384, MOST_BLOCKS = 64, ROW_RUN = 1024, CHUNK = 1024, SAMPLE_RUN = 256 };

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t ceiling(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* How a kernel meets an input along one axis: n inputs, k taps. Tap t meets the inputs first(t), first(t) + step, ...,
   below last(t). */
typedef struct {
  int64_t n, out, k, stride, padding, dilation, transposed;
} axis_t;

typedef struct {
  int64_t first, last, step;
} range_t;

static range_t meets(const axis_t *a, int64_t tap) {
  int64_t offset = tap * a->dilation - a->padding;
  range_t r;
  if (a->transposed) { /* input i gives output i * stride + offset */
    r.first = offset >= 0 ? 0 : ceiling(-offset, a->stride);
    r.last = a->out - offset <= 0 ? 0 : smaller(a->n, ceiling(a->out - offset, a->stride));
    r.step = 1;
  } else { /* output o takes input o * stride + offset */
    r.first = offset >= 0 ? offset : offset + ceiling(-offset, a->stride) * a->stride;
    r.last = smaller(a->n, (a->out - 1) * a->stride + offset + 1);
    r.step = a->stride;
  }
  return r;
}

/* A weight. */
typedef struct {
  int64_t outputs, groups, inputs, taps; /* inputs and taps of one output kernel */
  int64_t last, position, one_pass, shift;
} rows_t;

/* The samples whose statistics count, or the gradient through them. */
typedef struct {
  int64_t samples, inputs, last, position, centred; /* last: whether channels are the fastest axis */
  axis_t axes[3];                                   /* slowest first; unused ones have one input and one tap */
  double count;                                     /* the divisor that turns sums into statistics */
} samples_t;

/* The required properties of a tensor. */
typedef struct {
  int64_t optional, type, item, axes, size[5], stride[5]; /* type: torch's number for it; item: its bytes */
} expected_t;

/* The tensors that the calls get, in order, and their other arguments. */
enum { WEIGHT, GAIN, SAVED }; /* in every call; GAIN is optional */

/* EFFECTIVE, of type SAMPLE, is to be written; so is SHIFTED, the bias less sum w'' mu. STATISTICS are the means, then
   the masses: to be written, or read where there is no X. Behind them, the moving averages as they were, and how many
   batches were added to them, where there are any: MEAN, MASS and their counter BATCHES. */
enum { BIAS = 3, SCALE, EFFECTIVE, SHIFTED, STATISTICS, X, MEAN, MASS, BATCHES, FORWARD };
typedef struct {
  expected_t tensors[FORWARD]; /* optional: BIAS, SCALE, X, and the averages */
  rows_t rows;
  samples_t samples;
  int64_t by_input, by_tap; /* strides of the moving averages */
  double momentum;          /* below 0: the simple average */
} forward_t;

enum { RESULT = 3, EFFECTIVE_ALL };
typedef struct {
  expected_t tensors[EFFECTIVE_ALL];
  rows_t rows;
} effective_t;

/* G is dL/dw'' to read and dL/dw to write in its place, T the sum of dy for each output: to be written if there is DY.
   What comes back through the statistics is added to DX, or written to DSTATISTICS, or neither. */
enum { G = 3, T, DGAIN, DSTATISTICS, X_AGAIN, DX, DY, BACKWARD };
typedef struct {
  expected_t tensors[BACKWARD]; /* optional: the last four */
  rows_t rows;
  samples_t samples, outputs; /* outputs: how DY lies in memory; the rest of it is not used */
} backward_t;

/* Torch's functions on a tensor, each of which returns 0 if it succeeds. */
typedef struct {
  int32_t (*axes)(void *, int64_t *);
  int32_t (*sizes)(void *, int64_t **);
  int32_t (*strides)(void *, int64_t **);
  int32_t (*type)(void *, int32_t *);
  int32_t (*device)(void *, int32_t *);
  int32_t (*offset)(void *, int64_t *);
  int32_t (*storage_size)(void *, int64_t *);
  int32_t (*address)(void *, void **);
  int64_t cpu; /* the number of this device */
} torch_t;
static torch_t torch;

EXPORT void balnorm_use_torch(const torch_t *functions) { torch = *functions; }

/* The memory of a tensor (its _cdata in Python; 0 for None), if it is as expected, and all of it is there. */
static int find(int64_t tensor, const expected_t *e, void **address) {
  void *implementation = (void *)(intptr_t)tensor, *handle = &implementation; /* torch::Tensor is such a pointer */
  int64_t axes, offset, bytes, last = 0, elements = 1, *sizes, *strides;
  int32_t type, device;
  *address = 0;
  if (!tensor) return e->optional;
  if (torch.axes(handle, &axes) || axes != e->axes || torch.type(handle, &type) || type != e->type) return 0;
  if (torch.device(handle, &device) || device != torch.cpu) return 0;
  if (torch.sizes(handle, &sizes) || torch.strides(handle, &strides)) return 0;
  for (int64_t i = 0; i < axes; i++) {
    if (sizes[i] != e->size[i] || (sizes[i] > 1 && strides[i] != e->stride[i])) return 0;
    last += (sizes[i] - 1) * strides[i];
    elements *= sizes[i];
  }
  if (torch.offset(handle, &offset) || torch.storage_size(handle, &bytes)) return 0;
  if (elements && bytes < (offset + last + 1) * e->item) return 0; /* its storage was resized */
  return !torch.address(handle, address) && (*address || !elements);
}

/* 0, or 1 more than the number of the first tensor that is not as expected. */
static int find_all(const int64_t *tensors, const expected_t *expected, int count, void **addresses) {
  for (int i = 0; i < count; i++)
    if (!find(tensors[i], expected + i, addresses + i)) return i + 1;
  return 0;
}

/* The vector that the backward pass needs, besides tensors that torch keeps anyway, with these parts. */
typedef struct {
  int64_t scale, share, met, inverse_total, inverse_divisor, mean, positive, inverse_contribution;
  int64_t centre, signs, has_signs;
  int64_t size;
} saved_t;

static saved_t parts(const rows_t *r) {
  int64_t inputs = r->groups * r->inputs, n = inputs * r->taps, d = r->outputs, g = r->groups;
  saved_t s;
  s.scale = 0; /* first, because scale_of() in cpu.py reads it there */
  s.share = s.scale + d;
  s.met = s.share + n;
  s.inverse_total = s.met + (r->position ? n : inputs);
  s.inverse_divisor = s.inverse_total + g;
  s.mean = s.inverse_divisor + g;
  s.positive = s.mean + d;
  s.inverse_contribution = s.positive + d;
  s.centre = s.inverse_contribution + d;
  s.signs = s.centre + inputs;
  s.has_signs = s.signs + inputs;
  s.size = s.has_signs + 1;
  return s;
}

EXPORT int64_t balnorm_saved_size(const rows_t *r) { return parts(r).size; }

#define NO_MEMORY -1
#define FLOOR 1e-3 /* the smallest divisor of w'', as a fraction of the mean over the groups */

/* ---- Taps and inputs along one axis ------------------------------------------------------------------------------ */

typedef struct {
  const axis_t *axis;
  const double *in;
  double *out;
  int64_t inner;
} along_t;

FAST static void add_doubles(double *restrict out, const double *restrict in, int64_t length) {
  for (int64_t i = 0; i < length; i++) out[i] += in[i];
}

/* out (outer, k, inner): for each tap the sum of in (outer, n, inner) over the inputs that it meets. Inputs that all
   taps meet are added up once. */
static void gather(int64_t begin, int64_t end, void *context) {
  along_t *s = context;
  const axis_t *a = s->axis;
  int64_t inner = s->inner, lo = 0, hi = a->n;
  for (int64_t t = 0; t < a->k; t++) {
    range_t r = meets(a, t);
    lo = r.step == 1 ? larger(lo, r.first) : a->n;
    hi = smaller(hi, r.last);
  }
  if (a->k < 2 || hi < lo) hi = lo = a->n;
  for (int64_t o = begin; o < end; o++) {
    const double *in = s->in + o * a->n * inner;
    double *out = s->out + o * a->k * inner;
    memset(out, 0, sizeof(double) * a->k * inner);
    for (int64_t j = lo; j < hi; j++) add_doubles(out, in + j * inner, inner);
    for (int64_t t = a->k - 1; t >= 0; t--) { /* the first tap holds the common part until its own turn */
      range_t r = meets(a, t);
      double *tap = out + t * inner;
      if (t) memcpy(tap, out, sizeof(double) * inner);
      for (int64_t j = r.first; j < r.last; j += r.step)
        if (j < lo || j >= hi) add_doubles(tap, in + j * inner, inner);
    }
  }
}

/* The adjoint: out (outer, n, inner) from in (outer, k, inner). */
static void scatter(int64_t begin, int64_t end, void *context) {
  along_t *s = context;
  const axis_t *a = s->axis;
  int64_t inner = s->inner;
  for (int64_t o = begin; o < end; o++) {
    const double *in = s->in + o * a->k * inner;
    double *out = s->out + o * a->n * inner;
    memset(out, 0, sizeof(double) * a->n * inner);
    for (int64_t t = 0; t < a->k; t++) {
      range_t r = meets(a, t);
      for (int64_t j = r.first; j < r.last; j += r.step) add_doubles(out + j * inner, in + t * inner, inner);
    }
  }
}

static int64_t grain(int64_t work) { return WORTH_A_THREAD / larger(1, work) + 1; }

/* An image, (inputs, *n) or (*n, inputs), to its taps, one axis after the other, the fastest first. */
static int image_to_taps(const samples_t *m, const double *field, double *taps) {
  const axis_t *ax = m->axes;
  int64_t inner = m->last ? m->inputs : 1, outer = m->last ? 1 : m->inputs;
  double *a = malloc(sizeof(double) * m->inputs * ax[0].n * ax[1].n * ax[2].k);
  double *b = malloc(sizeof(double) * m->inputs * ax[0].n * ax[1].k * ax[2].k);
  int failed = !a || !b;
  if (!failed) {
    along_t s2 = {&ax[2], field, a, inner}, s1 = {&ax[1], a, b, inner * ax[2].k};
    along_t s0 = {&ax[0], b, taps, inner * ax[2].k * ax[1].k};
    parallel_for(0, outer * ax[0].n * ax[1].n, grain(ax[2].n * inner), gather, &s2);
    parallel_for(0, outer * ax[0].n, grain(ax[1].n * s1.inner), gather, &s1);
    gather(0, outer, &s0);
  }
  free(a);
  free(b);
  return failed;
}

/* The adjoint of image_to_taps. */
static int taps_to_image(const samples_t *m, const double *taps, double *field) {
  const axis_t *ax = m->axes;
  int64_t inner = m->last ? m->inputs : 1, outer = m->last ? 1 : m->inputs;
  double *a = malloc(sizeof(double) * m->inputs * ax[0].n * ax[1].k * ax[2].k);
  double *b = malloc(sizeof(double) * m->inputs * ax[0].n * ax[1].n * ax[2].k);
  int failed = !a || !b;
  if (!failed) {
    along_t s0 = {&ax[0], taps, a, inner * ax[2].k * ax[1].k};
    along_t s1 = {&ax[1], a, b, inner * ax[2].k}, s2 = {&ax[2], b, field, inner};
    scatter(0, outer, &s0);
    scatter(0, outer * ax[0].n, &s1);
    parallel_for(0, outer * ax[0].n * ax[1].n, grain(ax[2].n * inner), scatter, &s2);
  }
  free(a);
  free(b);
  return failed;
}

typedef uint16_t bfloat16; /* the upper half of a float */
static inline float from_bfloat16(bfloat16 half) {
  uint32_t bits = (uint32_t)half << 16;
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

static inline bfloat16 to_bfloat16(float value) { /* to the nearest, from the middle to the even one */
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return (bfloat16)(value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#define REAL float
#define SAMPLE float
#define READ(sample) (sample)
#define WRITE(value) (value)
#define NAME(name) name##_float
#define LARGEST FLT_MAX
#define SMALLEST FLT_MIN
#define EPSILON FLT_EPSILON
#include "kernels.c"
#undef SAMPLE
#undef READ
#undef WRITE
#undef NAME
#define SAMPLE bfloat16
#define READ(sample) from_bfloat16(sample)
#define WRITE(value) to_bfloat16(value)
#define NAME(name) name##_bfloat16
#include "kernels.c"
#undef REAL
#undef SAMPLE
#undef READ
#undef WRITE
#undef NAME
#undef LARGEST
#undef SMALLEST
#undef EPSILON
#define REAL double
#define SAMPLE double
#define READ(sample) (sample)
#define WRITE(value) (value)
#define NAME(name) name##_double
#define LARGEST DBL_MAX
#define SMALLEST DBL_MIN
#define EPSILON DBL_EPSILON
#include "kernels.c"

#else

/* ---- Statistics by channel -------------------------------------------------------------------------------------- */

/* Adds to first[j] and second[j], over i < repeats and x = x[i * period + j]: without a centre, x and its negative part;
   with one, |x - centre[j]| and its sign. Runs are short, so that float32 loses nothing to speak of; what they add up to
   is kept in double precision. */
FAST static void NAME(sum_periods)(const SAMPLE *x, int64_t repeats, int64_t period, const REAL *restrict centre,
                                   REAL *restrict run, REAL *restrict other, double *restrict first,
                                   double *restrict second) {
  while (repeats > 0) {
    int64_t length = smaller(repeats, SAMPLE_RUN), i = 0;
    memset(run, 0, sizeof(REAL) * period);
    memset(other, 0, sizeof(REAL) * period);
    if (centre) {
      for (; i < length; i++, x += period)
        for (int64_t j = 0; j < period; j++) {
          REAL d = READ(x[j]) - centre[j];
          run[j] += d < 0 ? -d : d;
          other[j] += d < 0 ? -1 : 1;
        }
    } else {
      for (; i + 4 <= length; i += 4, x += 4 * period)
        for (int64_t j = 0; j < period; j++) {
          REAL a = READ(x[j]), b = READ(x[j + period]), c = READ(x[j + 2 * period]), d = READ(x[j + 3 * period]);
          run[j] += (a + b) + (c + d);
          other[j] += ((a < 0 ? a : 0) + (b < 0 ? b : 0)) + ((c < 0 ? c : 0) + (d < 0 ? d : 0));
        }
      for (; i < length; i++, x += period)
        for (int64_t j = 0; j < period; j++) {
          REAL a = READ(x[j]);
          run[j] += a;
          other[j] += a < 0 ? a : 0;
        }
    }
    for (int64_t j = 0; j < period; j++) first[j] += run[j];
    for (int64_t j = 0; j < period; j++) second[j] += other[j];
    repeats -= length;
  }
}

/* The same for a run of one channel. */
FAST static void NAME(sum_run)(const SAMPLE *x, int64_t length, const REAL *centre, double *first, double *second) {
  while (length > 0) {
    int64_t some = smaller(length, 4096);
    REAL sum = 0, other = 0;
    if (centre) {
      REAL middle = *centre;
#pragma omp simd reduction(+ : sum, other)
      for (int64_t j = 0; j < some; j++) {
        REAL d = READ(x[j]) - middle;
        sum += d < 0 ? -d : d;
        other += d < 0 ? -1 : 1;
      }
    } else {
#pragma omp simd reduction(+ : sum, other)
      for (int64_t j = 0; j < some; j++) {
        REAL a = READ(x[j]);
        sum += a;
        other += a < 0 ? a : 0;
      }
    }
    *first += sum;
    *second += other;
    x += some;
    length -= some;
  }
}

typedef struct {
  const SAMPLE *x;
  const REAL *centre; /* 0, or a pattern of one period; of planes, a value for each input */
  int64_t repeats, period, blocks, inputs, failed;
  double *totals; /* blocks x 2 x period; of planes, blocks x 2 */
} NAME(blocks_t);

static void NAME(sum_blocks)(int64_t begin, int64_t end, void *context) {
  NAME(blocks_t) *s = context;
  REAL *runs = malloc(sizeof(REAL) * 2 * s->period);
  if (!runs) {
    s->failed = 1;
    return;
  }
  for (int64_t b = begin; b < end; b++) {
    int64_t from = s->repeats * b / s->blocks, to = s->repeats * (b + 1) / s->blocks;
    double *first = s->totals + b * 2 * s->period;
    NAME(sum_periods)(s->x + from * s->period, to - from, s->period, s->centre, runs, runs + s->period, first,
                      first + s->period);
  }
  free(runs);
}

static void NAME(sum_planes)(int64_t begin, int64_t end, void *context) { /* here a block is a plane of one sample */
  NAME(blocks_t) *s = context;
  for (int64_t b = begin; b < end; b++)
    NAME(sum_run)(s->x + b * s->period, s->period, s->centre ? s->centre + b % s->inputs : 0, s->totals + 2 * b,
                  s->totals + 2 * b + 1);
}

/* One pass over the samples: both sums of each channel. */
static int NAME(channel_sums)(const samples_t *m, const SAMPLE *x, const REAL *centre, double *first, double *second) {
  const axis_t *ax = m->axes;
  int64_t inputs = m->inputs, space = ax[0].n * ax[1].n * ax[2].n, length = m->samples * inputs * space;
  int64_t planes = m->samples * inputs; /* of one channel each; with channels last, one long list of pixels instead */
  int64_t period = m->last ? inputs * larger(1, 512 / inputs) : space;
  int64_t repeats = m->last ? length / period : 1;
  int64_t blocks = m->last ? larger(1, smaller(MOST_BLOCKS, repeats * period / WORTH_A_THREAD)) : planes;
  double *totals = calloc(2 * (m->last ? blocks * period : planes), sizeof(double));
  REAL *pattern = m->last ? malloc(sizeof(REAL) * (period + 2 * inputs)) : 0;
  int failed = !totals || (m->last && !pattern);
  memset(first, 0, sizeof(double) * inputs);
  memset(second, 0, sizeof(double) * inputs);
  if (!failed && m->last) {
    for (int64_t j = 0; centre && j < period; j += inputs) memcpy(pattern + j, centre, sizeof(REAL) * inputs);
    NAME(blocks_t) s = {x, centre ? pattern : 0, repeats, period, blocks, inputs, 0, totals};
    parallel_for(0, blocks, 1, NAME(sum_blocks), &s);
    failed = s.failed;
    for (int64_t j = 0; j < 2 * blocks * period; j += inputs)
      add_doubles(j / period % 2 ? second : first, totals + j, inputs);
    NAME(sum_periods)(x + repeats * period, (length - repeats * period) / inputs, inputs, centre, pattern + period,
                      pattern + period + inputs, first, second);
  } else if (!failed) {
    NAME(blocks_t) s = {x, centre, repeats, period, blocks, inputs, 0, totals};
    parallel_for(0, blocks, grain(space), NAME(sum_planes), &s);
    for (int64_t sample = 0; sample < m->samples; sample++)
      for (int64_t c = 0; c < inputs; c++) {
        first[c] += totals[2 * (sample * inputs + c)];
        second[c] += totals[2 * (sample * inputs + c) + 1];
      }
  }
  free(totals);
  free(pattern);
  return failed;
}

/* Writes mean and mass; with a centred mass also the centre and the mean sign. has_signs: whether signs matter. */
static int NAME(channel_statistics)(const samples_t *m, const SAMPLE *x, REAL *mean, REAL *mass, REAL *centre,
                                    REAL *signs, REAL *has_signs) {
  const axis_t *ax = m->axes;
  int64_t inputs = m->inputs;
  double elements = (double)m->samples * ax[0].n * ax[1].n * ax[2].n, *sums = malloc(sizeof(double) * 2 * inputs);
  int failed = !sums || NAME(channel_sums)(m, x, 0, sums, sums + inputs);
  *has_signs = m->centred ? 1 : 0;
  for (int64_t j = 0; !failed && j < inputs; j++) {
    double negative = sums[inputs + j];
    mean[j] = (REAL)(sums[j] / m->count);
    mass[j] = negative == 0 ? mean[j] : (REAL)((sums[j] - 2 * negative) / m->count);
    if (negative != 0) *has_signs = 1;
    centre[j] = m->centred ? (REAL)(sums[j] / elements) : 0;
    signs[j] = 0;
  }
  if (!failed && m->centred) {
    failed = NAME(channel_sums)(m, x, centre, sums, sums + inputs);
    for (int64_t j = 0; !failed && j < inputs; j++) {
      mass[j] = (REAL)(sums[j] / m->count);
      signs[j] = (REAL)(sums[inputs + j] / elements);
    }
  }
  free(sums);
  return failed;
}

/* ---- Statistics by position ------------------------------------------------------------------------------------- */

/* first[j], second[j] = sums over samples of x and of its negative part, element by element of an image. */
FAST static void NAME(sum_images)(const SAMPLE *x, int64_t samples, int64_t stride, int64_t length,
                                  double *restrict first, double *restrict second) {
  memset(first, 0, sizeof(double) * length);
  memset(second, 0, sizeof(double) * length);
  for (int64_t i = 0; i < samples;) {
    REAL run[CHUNK] = {0}, other[CHUNK] = {0};
    int64_t end = smaller(samples, i + SAMPLE_RUN);
    for (; i < end; i++) {
      const SAMPLE *a = x + i * stride;
      for (int64_t j = 0; j < length; j++) {
        REAL value = READ(a[j]);
        run[j] += value;
        other[j] += value < 0 ? value : 0;
      }
    }
    for (int64_t j = 0; j < length; j++) first[j] += run[j];
    for (int64_t j = 0; j < length; j++) second[j] += other[j];
  }
}

typedef struct {
  const SAMPLE *x;
  double *first, *second;
  int64_t samples, size;
} NAME(images_t);

static void NAME(sum_chunks)(int64_t begin, int64_t end, void *context) {
  NAME(images_t) *s = context;
  for (int64_t b = begin; b < end; b++) {
    int64_t from = b * CHUNK, length = smaller(s->size - from, CHUNK);
    NAME(sum_images)(s->x + from, s->samples, s->size, length, s->first + from, s->second + from);
  }
}

/* Sum the samples to one image, then reduce one axis after the other to its taps. */
static int NAME(position_statistics)(const samples_t *m, const SAMPLE *x, REAL *mean, REAL *mass, REAL *has_signs) {
  const axis_t *ax = m->axes;
  int64_t inputs = m->inputs, size = inputs * ax[0].n * ax[1].n * ax[2].n;
  int64_t taps = ax[0].k * ax[1].k * ax[2].k, masses = inputs * taps;
  double *fields = malloc(sizeof(double) * 2 * size), *sums = malloc(sizeof(double) * 2 * masses);
  int failed = !fields || !sums;
  *has_signs = 0;
  if (!failed) {
    NAME(images_t) s = {x, fields, fields + size, m->samples, size};
    parallel_for(0, ceiling(size, CHUNK), grain(CHUNK * m->samples), NAME(sum_chunks), &s);
    for (int64_t j = 0; j < size; j++)
      if (fields[size + j] != 0) *has_signs = 1;
    failed = image_to_taps(m, fields, sums) || (*has_signs && image_to_taps(m, fields + size, sums + masses));
  }
  for (int64_t c = 0; !failed && c < inputs; c++)
    for (int64_t t = 0; t < taps; t++) {
      int64_t from = m->last ? t * inputs + c : c * taps + t, to = c * taps + t;
      mean[to] = (REAL)(sums[from] / m->count);
      mass[to] = *has_signs ? (REAL)((sums[from] - 2 * sums[masses + from]) / m->count) : mean[to];
    }
  free(fields);
  free(sums);
  return failed;
}

/* ---- The gradient through the statistics ------------------------------------------------------------------------ */

typedef struct {
  SAMPLE *dx;
  const SAMPLE *x;                    /* 0 if no sign matters */
  const REAL *plus, *minus, *centre; /* to add where x >= centre, and elsewhere */
  int64_t length, period;            /* patterns of this period, or (planes) one value for each run of this length */
  int64_t inputs;
} NAME(add_t);

FAST static void NAME(add_pattern)(SAMPLE *restrict dx, const REAL *restrict plus, int64_t length) {
  for (int64_t i = 0; i < length; i++) dx[i] = WRITE(READ(dx[i]) + plus[i]);
}

FAST static void NAME(add_signed)(SAMPLE *restrict dx, const SAMPLE *restrict x, const REAL *restrict plus,
                                  const REAL *restrict minus, const REAL *restrict centre, int64_t length) {
  for (int64_t i = 0; i < length; i++) dx[i] = WRITE(READ(dx[i]) + (READ(x[i]) < centre[i] ? minus[i] : plus[i]));
}

FAST static void NAME(add_constant)(SAMPLE *dx, REAL plus, int64_t length) {
  for (int64_t i = 0; i < length; i++) dx[i] = WRITE(READ(dx[i]) + plus);
}

FAST static void NAME(add_constants)(SAMPLE *restrict dx, const SAMPLE *restrict x, REAL plus, REAL minus, REAL centre,
                                     int64_t length) {
  for (int64_t i = 0; i < length; i++) dx[i] = WRITE(READ(dx[i]) + (READ(x[i]) < centre ? minus : plus));
}

static void NAME(add_periods)(int64_t begin, int64_t end, void *context) {
  NAME(add_t) *s = context;
  for (int64_t b = begin; b < end; b++) {
    int64_t from = b * s->period, length = smaller(s->period, s->length - from);
    if (s->x)
      NAME(add_signed)(s->dx + from, s->x + from, s->plus, s->minus, s->centre, length);
    else
      NAME(add_pattern)(s->dx + from, s->plus, length);
  }
}

static void NAME(add_planes)(int64_t begin, int64_t end, void *context) {
  NAME(add_t) *s = context;
  for (int64_t b = begin; b < end; b++) {
    int64_t from = b * s->period, c = b % s->inputs;
    if (s->x)
      NAME(add_constants)(s->dx + from, s->x + from, s->plus[c], s->minus[c], s->centre[c], s->period);
    else
      NAME(add_constant)(s->dx + from, s->plus[c], s->period);
  }
}

static int NAME(add_gradient)(const samples_t *m, const SAMPLE *x, SAMPLE *dx, const REAL *dmean, const REAL *dmass,
                              const REAL *centre, const REAL *signs, int has_signs) {
  const axis_t *ax = m->axes;
  int64_t inputs = m->inputs, space = ax[0].n * ax[1].n * ax[2].n, size = inputs * space, length = m->samples * size;
  int64_t taps = m->position ? ax[0].k * ax[1].k * ax[2].k : 1, masses = inputs * taps;
  int planes = !m->position && !m->last;
  int64_t period = m->position ? size : m->last ? smaller(length, inputs * larger(1, 1024 / inputs)) : space;
  int64_t values = planes ? inputs : period; /* in each of the patterns plus, minus and centre */
  REAL *patterns = malloc(sizeof(REAL) * 3 * values);
  double *sums = m->position ? malloc(sizeof(double) * (masses + 2 * size)) : 0;
  int failed = !patterns || (m->position && !sums);
  REAL *plus = patterns, *minus = patterns + values, *middle = patterns + 2 * values;
  if (!failed && m->position) {
    for (int sign = 0; !failed && sign < 2; sign++) { /* with the mass, then against it */
      for (int64_t c = 0; c < inputs; c++)
        for (int64_t t = 0; t < taps; t++) {
          double da = dmass[c * taps + t], dmu = dmean[c * taps + t];
          sums[m->last ? t * inputs + c : c * taps + t] = (sign ? dmu - da : dmu + da) / m->count;
        }
      if (sign && !has_signs) break;
      failed = taps_to_image(m, sums, sums + masses + sign * size);
      for (int64_t j = 0; !failed && j < size; j++) (sign ? minus : plus)[j] = (REAL)sums[masses + sign * size + j];
    }
    for (int64_t j = 0; !failed && j < size; j++) middle[j] = 0;
  } else if (!failed) {
    for (int64_t c = 0; c < inputs; c++) {
      double da = dmass[c], dmu = dmean[c] - (m->centred ? da * signs[c] : 0);
      plus[c] = (REAL)((dmu + da) / m->count);
      minus[c] = (REAL)((dmu - da) / m->count);
      middle[c] = m->centred ? centre[c] : 0;
    }
    for (int64_t j = inputs; j < values; j++) {
      plus[j] = plus[j - inputs];
      minus[j] = minus[j - inputs];
      middle[j] = middle[j - inputs];
    }
  }
  if (!failed) {
    NAME(add_t) s = {dx, has_signs ? x : 0, plus, minus, middle, length, period, inputs};
    parallel_for(0, ceiling(length, period), grain(period), planes ? NAME(add_planes) : NAME(add_periods), &s);
  }
  free(patterns);
  free(sums);
  return failed;
}

/* ---- Moving averages -------------------------------------------------------------------------------------------- */

static void NAME(move)(REAL *average, REAL value, REAL rate) {
  REAL change = value - *average; /* as torch.lerp: from the nearer end, so that a rate of 1 copies */
  *average = rate < (REAL)0.5 ? *average + rate * change : value - change * (1 - rate);
}

/* Writes the averages as they were, and how many batches were added: one, or none if this one is not finite. */
static void NAME(track)(const forward_t *f, const REAL *statistics, REAL *mean, REAL *mass, int64_t *batches,
                        REAL *before) {
  const rows_t *r = &f->rows;
  int64_t inputs = r->groups * r->inputs, taps = r->position ? r->taps : 1, masses = inputs * taps;
  REAL total = 0;
  for (int64_t j = 0; j < masses; j++) total += statistics[masses + j];
  before[2 * masses] = 0;
  if (!(fabs((double)total) <= LARGEST)) return;
  before[2 * masses] = 1;
  *batches += 1;
  REAL least = f->momentum < 0 ? 0 : (REAL)f->momentum, simple = *batches ? (REAL)1 / *batches : 1;
  REAL rate = least > simple ? least : simple;
  for (int64_t c = 0; c < inputs; c++)
    for (int64_t t = 0; t < taps; t++) {
      int64_t at = c * f->by_input + t * f->by_tap, j = c * taps + t;
      before[j] = mean[at];
      before[masses + j] = mass[at];
      NAME(move)(mean + at, statistics[j], rate);
      NAME(move)(mass + at, statistics[masses + j], rate);
    }
}

/* ---- Balance ---------------------------------------------------------------------------------------------------- */

/* The rule of method.py for what counts as more than rounding error. */
static int NAME(counts)(REAL value, REAL magnitude, int64_t terms) {
  REAL floor = (REAL)(fabs((double)magnitude) * (4 * EPSILON * sqrt((double)terms)));
  REAL size = value < 0 ? -value : value;
  return size > (floor < SMALLEST ? SMALLEST : floor) && size <= LARGEST;
}

static REAL NAME(inverse)(REAL value) { /* at most so large that products with it stay finite */
  REAL inverse = 1 / value, most = LARGEST * EPSILON;
  return inverse > most ? most : inverse < -most ? -most : inverse;
}

typedef struct {
  const REAL *w, *gain;
  REAL *scale, *share, *met, *inverse_total, *inverse_divisor, *mean, *positive, *inverse_contribution;
  REAL *centre, *signs, *has_signs;
  SAMPLE *effective;               /* forward only */
  const REAL *bias;                /* forward only */
  SAMPLE *shifted;                 /* forward only */
  REAL *g, *dgain, *columns, *sums; /* backward only: columns of dmass, and of dmean where the mean matters */
  const REAL *t;
  REAL *mu; /* met, in the order of the rows; 0 where the mean does not matter */
  int64_t n, rows_per_group, rows_per_block, blocks_per_group, one_pass, shift;
} NAME(rows_t);

static NAME(rows_t) NAME(unpack)(void **tensors, const rows_t *r) {
  saved_t at = parts(r);
  REAL *saved = tensors[SAVED];
  NAME(rows_t) s;
  memset(&s, 0, sizeof(s));
  s.w = tensors[WEIGHT];
  s.gain = tensors[GAIN];
  s.scale = saved + at.scale;
  s.share = saved + at.share;
  s.met = saved + at.met;
  s.inverse_total = saved + at.inverse_total;
  s.inverse_divisor = saved + at.inverse_divisor;
  s.mean = saved + at.mean;
  s.positive = saved + at.positive;
  s.inverse_contribution = saved + at.inverse_contribution;
  s.centre = saved + at.centre;
  s.signs = saved + at.signs;
  s.has_signs = saved + at.has_signs;
  s.n = r->inputs * r->taps;
  s.rows_per_group = r->outputs / r->groups;
  s.one_pass = r->one_pass;
  s.shift = r->shift;
  s.rows_per_block = larger(32, ceiling(s.rows_per_group, MOST_BLOCKS));
  s.blocks_per_group = ceiling(s.rows_per_group, s.rows_per_block);
  return s;
}

static REAL NAME(full_gain)(const NAME(rows_t) *s, int64_t d) {
  return s->gain ? s->gain[d] * s->scale[d] : s->scale[d];
}

/* Where no input is negative and weights are shifted, mean and mass are the same and sum w'' mu = 0: the paper's case.
   Elsewhere the means are needed in the order of the rows. */
static int NAME(lay_out_means)(const rows_t *r, NAME(rows_t) *s) {
  if (s->shift && *s->has_signs == 0) return 0;
  int64_t inputs = r->inputs, taps = r->taps, stored = r->position ? taps : 1;
  s->mu = malloc(sizeof(REAL) * r->groups * s->n);
  if (!s->mu) return 1;
  for (int64_t group = 0; group < r->groups; group++)
    for (int64_t c = 0; c < inputs; c++)
      for (int64_t t = 0; t < taps; t++)
        s->mu[group * s->n + (r->last ? t * inputs + c : c * taps + t)] =
            s->met[(group * inputs + c) * stored + (r->position ? t : 0)];
  return 0;
}

FAST static void NAME(scale_row)(const REAL *restrict w, SAMPLE *restrict out, int64_t n, REAL mean,
                                 REAL inverse_contribution, REAL factor) {
  for (int64_t i = 0; i < n; i++) out[i] = WRITE((w[i] - mean) * inverse_contribution * factor);
}

/* sum of v mu. Runs are short, as in sum_periods. */
FAST static double NAME(sum_met)(const REAL *restrict w, const REAL *restrict mu, int64_t n, REAL mean,
                                 REAL inverse_contribution) {
  double total = 0;
  for (int64_t from = 0; from < n; from += ROW_RUN) {
    int64_t to = smaller(n, from + ROW_RUN);
    REAL sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = from; i < to; i++) sum += (w[i] - mean) * inverse_contribution * mu[i];
    total += sum;
  }
  return total;
}

/* mean = sum p w; positive = sum p I, contribution = sum p (w - centre) I with I = [w > threshold]. */
FAST static void NAME(sum_row)(const REAL *restrict w, const REAL *restrict p, int64_t n, REAL threshold, REAL centre,
                               double *mean, double *positive, double *contribution) {
  *mean = *positive = *contribution = 0;
  for (int64_t from = 0; from < n; from += ROW_RUN) {
    int64_t to = smaller(n, from + ROW_RUN);
    REAL all = 0, some = 0, part = 0;
#pragma omp simd reduction(+ : all, some, part)
    for (int64_t i = from; i < to; i++) {
      REAL q = w[i] > threshold ? p[i] : 0;
      all += w[i] * p[i];
      some += q;
      part += (w[i] - centre) * q;
    }
    *mean += all;
    *positive += some;
    *contribution += part;
  }
}

static void NAME(measure_row)(const REAL *w, const REAL *p, int64_t n, int64_t one_pass, int64_t shift, REAL *mean_,
                              REAL *positive_, REAL *contribution_) {
  double mean, positive, contribution;
  NAME(sum_row)(w, p, n, 0, 0, &mean, &positive, &contribution);
  if (!shift) { /* 1/2 sum p |w| */
    contribution -= mean / 2;
    mean = positive = 0;
  } else if (one_pass) {
    contribution -= mean * positive;
  } else {
    double again;
    NAME(sum_row)(w, p, n, (REAL)mean, (REAL)mean, &again, &positive, &contribution);
  }
  *mean_ = (REAL)mean;
  *positive_ = (REAL)positive;
  *contribution_ = (REAL)contribution;
}

static void NAME(balance_rows)(int64_t begin, int64_t end, void *context) {
  NAME(rows_t) *s = context;
  for (int64_t d = begin; d < end; d++) {
    int64_t group = d / s->rows_per_group, n = s->n;
    const REAL *w = s->w + d * n;
    REAL contribution, factor = s->inverse_divisor[group] * NAME(full_gain)(s, d), inverse;
    NAME(measure_row)(w, s->share + group * n, n, s->one_pass, s->shift, s->mean + d, s->positive + d, &contribution);
    inverse = NAME(counts)(contribution, s->mean[d], n) ? 1 / contribution : 0;
    s->inverse_contribution[d] = inverse;
    NAME(scale_row)(w, s->effective + d * n, n, s->mean[d], inverse, factor);
    REAL offset = s->mu ? (REAL)(NAME(sum_met)(w, s->mu + group * n, n, s->mean[d], inverse) * factor) : 0;
    s->shifted[d] = WRITE((s->bias ? s->bias[d] : 0) - offset);
  }
}

static void NAME(scale_rows)(int64_t begin, int64_t end, void *context) {
  NAME(rows_t) *s = context;
  for (int64_t d = begin; d < end; d++)
    NAME(scale_row)(s->w + d * s->n, s->effective + d * s->n, s->n, s->mean[d], s->inverse_contribution[d],
                    s->inverse_divisor[d / s->rows_per_group] * NAME(full_gain)(s, d));
}

/* Shares and totals of all groups, from the masses. */
static void NAME(share_out)(const rows_t *r, NAME(rows_t) *s, const REAL *mean, const REAL *mass) {
  int64_t inputs = r->inputs, taps = r->taps, stored = r->position ? taps : 1;
  double all = 0;
  for (int64_t group = 0; group < r->groups; group++) {
    const REAL *m = mass + group * inputs * stored, *mu = mean + group * inputs * stored;
    REAL *p = s->share + group * s->n, *met = s->met + group * inputs * stored;
    double exact = 0, magnitude = 0; /* in double: added one by one, floats lose more than the rule for zero allows */
    for (int64_t c = 0; c < inputs; c++)
      for (int64_t t = 0; t < taps; t++) {
        int64_t from = c * stored + (r->position ? t : 0);
        p[r->last ? t * inputs + c : c * taps + t] = m[from];
        exact += m[from];
        magnitude += fmax(fabs((double)m[from]), fabs((double)mu[from]));
      }
    REAL total = (REAL)exact;
    int present = NAME(counts)(total, (REAL)magnitude, s->n);
    s->inverse_total[group] = present ? NAME(inverse)(total) : 0;
    s->inverse_divisor[group] = present ? total : 0; /* the divisor itself, until all are known */
    for (int64_t i = 0; i < s->n; i++) p[i] = present ? p[i] / total : 0;
    for (int64_t j = 0; j < inputs * stored; j++) met[j] = present ? mu[j] : 0;
    all += present ? exact : 0;
  }
  REAL floor = (REAL)(FLOOR * (all / r->groups));
  for (int64_t group = 0; group < r->groups; group++) {
    REAL total = s->inverse_divisor[group];
    int floored = r->groups > 1 && floor > total;
    if (total != 0) s->inverse_divisor[group] = floored ? NAME(inverse)(floor) : s->inverse_total[group];
  }
}

/* Statistics, their shares, and all rows. These functions return 0, NO_MEMORY, or what find_all() returns. */
EXPORT int NAME(balnorm_forward)(const int64_t *tensors, const forward_t *f) {
  void *at[FORWARD];
  int failed = find_all(tensors, f->tensors, FORWARD, at);
  if (failed) return failed;
  const rows_t *r = &f->rows;
  NAME(rows_t) s = NAME(unpack)(at, r);
  int64_t masses = r->groups * r->inputs * (r->position ? r->taps : 1), inputs = r->groups * r->inputs;
  REAL *mean = at[STATISTICS], *mass = mean + masses;
  const SAMPLE *x = at[X];
  if (x) {
    if (r->position ? NAME(position_statistics)(&f->samples, x, mean, mass, s.has_signs)
                    : NAME(channel_statistics)(&f->samples, x, mean, mass, s.centre, s.signs, s.has_signs))
      return NO_MEMORY;
  } else {
    *s.has_signs = 0;
    for (int64_t j = 0; j < masses; j++)
      if (mean[j] != mass[j]) *s.has_signs = 1;
  }
  if (!x || r->position) {
    memset(s.centre, 0, sizeof(REAL) * inputs);
    memset(s.signs, 0, sizeof(REAL) * inputs);
  }
  NAME(share_out)(r, &s, mean, mass);
  if (NAME(lay_out_means)(r, &s)) return NO_MEMORY;
  const REAL *scale = at[SCALE];
  for (int64_t d = 0; d < r->outputs; d++) s.scale[d] = scale ? scale[d] : 1;
  s.effective = at[EFFECTIVE];
  s.bias = at[BIAS];
  s.shifted = at[SHIFTED];
  parallel_for(0, r->outputs, grain(s.n), NAME(balance_rows), &s);
  free(s.mu);
  if (at[MEAN] && at[MASS] && at[BATCHES])
    NAME(track)(f, mean, at[MEAN], at[MASS], at[BATCHES], mean + 2 * masses);
  return 0;
}

/* The effective weight once more, from what balnorm_forward left. */
EXPORT int NAME(balnorm_effective)(const int64_t *tensors, const effective_t *f) {
  void *at[EFFECTIVE_ALL];
  int failed = find_all(tensors, f->tensors, EFFECTIVE_ALL, at);
  if (failed) return failed;
  NAME(rows_t) s = NAME(unpack)(at, &f->rows);
  s.effective = at[RESULT];
  parallel_for(0, f->rows.outputs, grain(s.n), NAME(scale_rows), &s);
  return 0;
}

/* g -= t mu, and what that means for the gradient of mu. */
FAST static void NAME(subtract_means)(REAL *restrict g, const REAL *restrict w, const REAL *restrict mu,
                                      REAL *restrict columns, int64_t n, REAL mean, REAL inverse_contribution, REAL t,
                                      REAL gain) {
  for (int64_t i = 0; i < n; i++) {
    g[i] -= t * mu[i];
    columns[i] += t * gain * ((w[i] - mean) * inverse_contribution);
  }
}

FAST static void NAME(project_row)(const REAL *restrict g, const REAL *restrict w, int64_t n, REAL mean,
                                   REAL inverse_contribution, REAL *sum_, REAL *sum_v_) {
  REAL sum = 0, sum_v = 0;
#pragma omp simd reduction(+ : sum, sum_v)
  for (int64_t i = 0; i < n; i++) {
    sum += g[i];
    sum_v += g[i] * ((w[i] - mean) * inverse_contribution);
  }
  *sum_ = sum;
  *sum_v_ = sum_v;
}

/* q = above where the weight is above the threshold, below where it is below, and between where it is equal. */
FAST static void NAME(backward_row)(REAL *restrict g, const REAL *restrict w, const REAL *restrict p,
                                    REAL *restrict columns, int64_t n, REAL mean, REAL inverse_contribution,
                                    REAL factor, REAL threshold, REAL above, REAL below, REAL between) {
  for (int64_t i = 0; i < n; i++) {
    REAL q = w[i] > threshold ? above : w[i] < threshold ? below : between;
    REAL v = (w[i] - mean) * inverse_contribution;
    g[i] = (g[i] * factor - p[i] * q) * inverse_contribution;
    columns[i] += v * q;
  }
}

static void NAME(backward_blocks)(int64_t begin, int64_t end, void *context) {
  NAME(rows_t) *s = context;
  int64_t n = s->n, blocks = s->blocks_per_group;
  for (int64_t b = begin; b < end; b++) {
    int64_t group = b / blocks, first = (b % blocks) * s->rows_per_block;
    int64_t last = smaller(s->rows_per_group, first + s->rows_per_block);
    REAL *columns = s->columns + b * n * (s->mu ? 2 : 1), divisor = s->inverse_divisor[group];
    for (int64_t row = first; row < last; row++) {
      int64_t d = group * s->rows_per_group + row;
      const REAL *w = s->w + d * n;
      REAL *g = s->g + d * n, mean = s->mean[d], inverse = s->inverse_contribution[d], sum, sum_v;
      REAL gain = NAME(full_gain)(s, d);
      if (s->mu) NAME(subtract_means)(g, w, s->mu + group * n, columns + n, n, mean, inverse, s->t[d], gain);
      NAME(project_row)(g, w, n, mean, inverse, &sum, &sum_v);
      s->dgain[d] = sum_v * divisor * s->scale[d];
      REAL u = sum_v * divisor * gain, db = sum * divisor * gain - u * s->positive[d];
      s->sums[b] += u;
      if (s->shift)
        NAME(backward_row)(g, w, s->share + group * n, columns, n, mean, inverse, divisor * gain,
                           s->one_pass ? 0 : mean, db + u, db, db);
      else
        NAME(backward_row)(g, w, s->share + group * n, columns, n, mean, inverse, divisor * gain, 0, u / 2, -u / 2, 0);
    }
  }
}

FAST static void NAME(add_to)(REAL *restrict out, const REAL *restrict in, int64_t length) {
  for (int64_t i = 0; i < length; i++) out[i] += in[i];
}

/* Columns of one group, (taps, inputs) or (inputs, taps), to (inputs, taps) or to their sums over taps. */
static void NAME(to_statistic)(const rows_t *r, const REAL *columns, REAL factor, REAL *out) {
  for (int64_t c = 0; c < r->inputs; c++) {
    REAL sum = 0;
    for (int64_t t = 0; t < r->taps; t++) {
      REAL value = columns[r->last ? t * r->inputs + c : c * r->taps + t];
      if (r->position)
        out[c * r->taps + t] = value * factor;
      else
        sum += value;
    }
    if (!r->position) out[c] = sum * factor;
  }
}

static int NAME(sum_outputs)(const samples_t *m, const SAMPLE *dy, REAL *t) {
  double *sums = malloc(sizeof(double) * 2 * m->inputs);
  int failed = !sums || NAME(channel_sums)(m, dy, 0, sums, sums + m->inputs);
  for (int64_t d = 0; !failed && d < m->inputs; d++) t[d] = (REAL)sums[d];
  free(sums);
  return failed;
}

EXPORT int NAME(balnorm_backward)(const int64_t *tensors, const backward_t *a) {
  void *at[BACKWARD];
  int failed = find_all(tensors, a->tensors, BACKWARD, at);
  if (failed) return failed;
  const rows_t *r = &a->rows;
  if (at[DY] && NAME(sum_outputs)(&a->outputs, at[DY], at[T])) return NO_MEMORY;
  NAME(rows_t) s = NAME(unpack)(at, r);
  int64_t blocks = r->groups * s.blocks_per_group, stored = r->position ? r->taps : 1, per_group = r->inputs * stored;
  int64_t masses = r->groups * per_group, shared = r->position ? 1 : r->taps; /* how many taps share a mass */
  if (NAME(lay_out_means)(r, &s)) return NO_MEMORY;
  int64_t width = s.n * (s.mu ? 2 : 1);
  REAL *work = calloc(blocks * width + blocks + 2 * masses, sizeof(REAL));
  if (!work) {
    free(s.mu);
    return NO_MEMORY;
  }
  s.g = at[G];
  s.t = at[T];
  s.dgain = at[DGAIN];
  s.columns = work;
  s.sums = work + blocks * width;
  REAL *dmean = at[DSTATISTICS] ? at[DSTATISTICS] : s.sums + blocks, *dmass = dmean + masses;
  memset(dmean, 0, sizeof(REAL) * masses);
  parallel_for(0, blocks, grain(s.n * smaller(s.rows_per_group, s.rows_per_block)), NAME(backward_blocks), &s);
  double through_floor = 0;
  for (int64_t group = 0; group < r->groups; group++) {
    REAL *columns = s.columns + group * s.blocks_per_group * width, *sums = s.sums + group * s.blocks_per_group;
    REAL total = s.inverse_total[group], divisor = s.inverse_divisor[group];
    for (int64_t b = 1; b < s.blocks_per_group; b++) {
      NAME(add_to)(columns, columns + b * width, width);
      sums[0] += sums[b];
    }
    NAME(to_statistic)(r, columns, -total, dmass + group * per_group);
    if (s.mu) NAME(to_statistic)(r, columns + s.n, -divisor, dmean + group * per_group);
    if (divisor < total) { /* the divisor is the floor: M has no part in it, and the masses of all groups have */
      int lone = r->inputs == 1 && !r->position; /* then p does not depend on the mass */
      for (int64_t j = 0; j < per_group; j++) {
        REAL *value = dmass + group * per_group + j;
        *value = lone ? 0 : *value + sums[0] * total * shared;
      }
      through_floor += (double)sums[0] * divisor;
    }
  }
  for (int64_t j = 0; through_floor != 0 && j < masses; j++)
    if (s.inverse_total[j / per_group] != 0) dmass[j] -= (REAL)(FLOOR / r->groups * through_floor * shared);
  if (at[DX] && at[X_AGAIN] &&
      NAME(add_gradient)(&a->samples, at[X_AGAIN], at[DX], dmean, dmass, s.centre, s.signs, *s.has_signs != 0))
    failed = NO_MEMORY;
  free(work);
  free(s.mu);
  return failed;
}

#endif

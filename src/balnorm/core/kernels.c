/* The closed form's work on a CPU: what torch would need dozens of small calls and passes for.

   This file needs no header of torch. Tensors arrive as addresses and sizes in one of the structs below, which
   native.py fills in; it checks every size and layout, so nothing is checked here. Threads are torch's own, through
   the address that balnorm_use_threads() gets. Work is divided by its size alone, never by the number of threads, so
   results are the same, bit for bit, whatever the threads do.

   The symbols are those of closed_form.py: mass m, shares p, mean, contribution c, v = (w - mean) / c. A weight is a
   matrix with a row for each output kernel; a row holds taps x inputs ("last", the order of channels_last) or
   inputs x taps. A mass is always inputs x taps, with one tap where all taps share it.

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

/* Goes up with every change of what the structs below hold or mean, here and in native.py. */
EXPORT int balnorm_interface(void) { return 3; }

EXPORT void balnorm_use_threads(parallel_for_t address) { parallel_for = address; }

enum { WORTH_A_THREAD = 65536, MOST_BLOCKS = 64, ROW_RUN = 1024, CHUNK = 2048 };

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

/* The samples whose mass counts, or the gradient that it hands on to them. */
typedef struct {
  int64_t x, mass;                         /* addresses; mass is inputs x taps */
  int64_t samples, inputs, last, position; /* whether channels are the fastest axis; which mass */
  axis_t axes[3];                          /* slowest first; unused ones have one input and one tap */
  double count;                            /* what turns sums into masses */
} samples_t;

/* A weight and its balance. */
typedef struct {
  int64_t weight, gain, scale; /* addresses; gain and scale may be 0 */
  int64_t effective;           /* weight-sized, of type SAMPLE, to write */
  int64_t share, inverse_total, mean, positive, inverse_contribution;
  int64_t outputs, groups, inputs, taps; /* inputs and taps of one output kernel */
  int64_t last, position, one_pass;
} rows_t;

typedef struct {
  rows_t rows;
  int64_t mass;                       /* address of the mass to balance for */
  int64_t running, batches;           /* addresses of the moving average and its counter, both or neither */
  int64_t running_input, running_tap; /* strides of the moving average */
  double momentum;                    /* below 0: the plain average */
  samples_t samples;                  /* where to take the mass from; x is 0 where it is given */
} forward_t;

typedef struct {
  rows_t rows;
  int64_t g;            /* dL/dw'' to read, dL/dw to write in its place */
  int64_t dgain, dmass; /* to write; dmass may be 0 where samples get it */
  samples_t samples;    /* where to add what comes back by way of the mass; x is 0 for nowhere */
} backward_t;

#define P(type, address) ((type *)(intptr_t)(address))

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

/* ---- Sums over samples ------------------------------------------------------------------------------------------ */

/* total[j] += the sum of x[i * period + j] over i < repeats. Runs are short, so that float32 loses nothing to speak
   of; what they add up to is kept in double precision. */
FAST static void NAME(sum_periods)(const SAMPLE *x, int64_t repeats, int64_t period, REAL *restrict run,
                                   double *restrict total) {
  while (repeats > 0) {
    int64_t length = smaller(repeats, 256), i = 0;
    memset(run, 0, sizeof(REAL) * period);
    for (; i + 4 <= length; i += 4, x += 4 * period)
      for (int64_t j = 0; j < period; j++)
        run[j] += (READ(x[j]) + READ(x[j + period])) + (READ(x[j + 2 * period]) + READ(x[j + 3 * period]));
    for (; i < length; i++, x += period)
      for (int64_t j = 0; j < period; j++) run[j] += READ(x[j]);
    for (int64_t j = 0; j < period; j++) total[j] += run[j];
    repeats -= length;
  }
}

FAST static double NAME(sum_run)(const SAMPLE *x, int64_t length) {
  double total = 0;
  while (length > 0) {
    int64_t some = smaller(length, 4096);
    REAL sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < some; j++) sum += READ(x[j]);
    total += sum;
    x += some;
    length -= some;
  }
  return total;
}

typedef struct {
  const SAMPLE *x;
  int64_t repeats, period, blocks, failed;
  double *totals; /* blocks x period */
} NAME(blocks_t);

static void NAME(sum_blocks)(int64_t begin, int64_t end, void *context) {
  NAME(blocks_t) *s = context;
  REAL *run = malloc(sizeof(REAL) * s->period);
  if (!run) {
    s->failed = 1;
    return;
  }
  for (int64_t b = begin; b < end; b++) {
    int64_t from = s->repeats * b / s->blocks, to = s->repeats * (b + 1) / s->blocks;
    NAME(sum_periods)(s->x + from * s->period, to - from, s->period, run, s->totals + b * s->period);
  }
  free(run);
}

static void NAME(sum_planes)(int64_t begin, int64_t end, void *context) { /* here a block is a plane of one sample */
  NAME(blocks_t) *s = context;
  for (int64_t b = begin; b < end; b++) s->totals[b] = NAME(sum_run)(s->x + b * s->period, s->period);
}

/* out[j] = sum over samples of the image x, element by element. */
FAST static void NAME(sum_images)(const SAMPLE *x, int64_t samples, int64_t stride, int64_t length,
                                  REAL *restrict out) {
  memset(out, 0, sizeof(REAL) * length);
  int64_t i = 0;
  for (; i + 4 <= samples; i += 4) {
    const SAMPLE *a = x + i * stride;
    for (int64_t j = 0; j < length; j++)
      out[j] += (READ(a[j]) + READ(a[j + stride])) + (READ(a[j + 2 * stride]) + READ(a[j + 3 * stride]));
  }
  for (; i < samples; i++)
    for (int64_t j = 0; j < length; j++) out[j] += READ(x[i * stride + j]);
}

typedef struct {
  const SAMPLE *x;
  REAL *field;
  int64_t samples, size;
} NAME(images_t);

static void NAME(sum_chunks)(int64_t begin, int64_t end, void *context) {
  NAME(images_t) *s = context;
  for (int64_t b = begin; b < end; b++) {
    int64_t from = b * CHUNK, length = smaller(s->size - from, CHUNK);
    NAME(sum_images)(s->x + from, s->samples, s->size, length, s->field + from);
  }
}

/* ---- Taps and inputs along one axis ----------------------------------------------------------------------------- */

typedef struct {
  const axis_t *axis;
  const REAL *in;
  REAL *out;
  int64_t inner;
} NAME(along_t);

FAST static void NAME(add_to)(REAL *restrict out, const REAL *restrict in, int64_t length) {
  for (int64_t i = 0; i < length; i++) out[i] += in[i];
}

/* out (outer, k, inner): for each tap the sum of in (outer, n, inner) over the inputs that it meets. Inputs that all
   taps meet are added up once. */
static void NAME(gather)(int64_t begin, int64_t end, void *context) {
  NAME(along_t) *s = context;
  const axis_t *a = s->axis;
  int64_t inner = s->inner, lo = 0, hi = a->n;
  for (int64_t t = 0; t < a->k; t++) {
    range_t r = meets(a, t);
    lo = r.step == 1 ? larger(lo, r.first) : a->n;
    hi = smaller(hi, r.last);
  }
  if (a->k < 2 || hi < lo) hi = lo = a->n;
  for (int64_t o = begin; o < end; o++) {
    const REAL *in = s->in + o * a->n * inner;
    REAL *out = s->out + o * a->k * inner;
    memset(out, 0, sizeof(REAL) * a->k * inner);
    for (int64_t j = lo; j < hi; j++) NAME(add_to)(out, in + j * inner, inner);
    for (int64_t t = a->k - 1; t >= 0; t--) { /* the first tap holds the common part until its own turn */
      range_t r = meets(a, t);
      REAL *tap = out + t * inner;
      if (t) memcpy(tap, out, sizeof(REAL) * inner);
      for (int64_t j = r.first; j < r.last; j += r.step)
        if (j < lo || j >= hi) NAME(add_to)(tap, in + j * inner, inner);
    }
  }
}

/* The adjoint: out (outer, n, inner) from in (outer, k, inner). */
static void NAME(scatter)(int64_t begin, int64_t end, void *context) {
  NAME(along_t) *s = context;
  const axis_t *a = s->axis;
  int64_t inner = s->inner;
  for (int64_t o = begin; o < end; o++) {
    const REAL *in = s->in + o * a->k * inner;
    REAL *out = s->out + o * a->n * inner;
    memset(out, 0, sizeof(REAL) * a->n * inner);
    for (int64_t t = 0; t < a->k; t++) {
      range_t r = meets(a, t);
      for (int64_t j = r.first; j < r.last; j += r.step) NAME(add_to)(out + j * inner, in + t * inner, inner);
    }
  }
}

/* ---- Mass ------------------------------------------------------------------------------------------------------- */

static int NAME(channel_mass)(const samples_t *m) {
  const SAMPLE *x = P(const SAMPLE, m->x);
  REAL *mass = P(REAL, m->mass);
  const axis_t *ax = m->axes;
  int64_t inputs = m->inputs, space = ax[0].n * ax[1].n * ax[2].n, length = m->samples * inputs * space;
  int64_t planes = m->samples * inputs; /* of one channel each; with channels last, one long list of pixels instead */
  int64_t period = m->last ? inputs * larger(1, 512 / inputs) : space;
  int64_t repeats = m->last ? length / period : 1;
  int64_t blocks = m->last ? larger(1, smaller(MOST_BLOCKS, repeats * period / WORTH_A_THREAD)) : planes;
  double *totals = calloc(m->last ? blocks * period : planes, sizeof(double));
  double *sums = calloc(inputs, sizeof(double));
  int failed = !totals || !sums;
  if (!failed) {
    NAME(blocks_t) s = {x, repeats, period, blocks, 0, totals};
    if (m->last)
      parallel_for(0, blocks, 1, NAME(sum_blocks), &s);
    else
      parallel_for(0, blocks, WORTH_A_THREAD / space + 1, NAME(sum_planes), &s);
    failed = s.failed;
    if (m->last) {
      for (int64_t b = 0; b < blocks; b++)
        for (int64_t j = 0; j < period; j++) sums[j % inputs] += totals[b * period + j];
      const SAMPLE *rest = x + repeats * period;
      for (int64_t j = 0; j < length - repeats * period; j++) sums[j % inputs] += READ(rest[j]);
    } else {
      for (int64_t b = 0; b < planes; b++) sums[b % inputs] += totals[b];
    }
    for (int64_t j = 0; j < inputs; j++) mass[j] = (REAL)(sums[j] / m->count);
  }
  free(totals);
  free(sums);
  return failed;
}

/* Sum the samples to one image, then reduce one axis after the other to its taps, the fastest first. */
static int NAME(position_mass)(const samples_t *m) {
  const SAMPLE *x = P(const SAMPLE, m->x);
  REAL *mass = P(REAL, m->mass);
  const axis_t *ax = m->axes;
  int64_t inputs = m->inputs, size = inputs * ax[0].n * ax[1].n * ax[2].n;
  int64_t taps = ax[0].k * ax[1].k * ax[2].k, inner = m->last ? inputs : 1, outer = m->last ? 1 : inputs;
  int64_t largest = inputs * ax[0].n * ax[1].n * ax[2].k;
  REAL *field = malloc(sizeof(REAL) * size), *a = malloc(sizeof(REAL) * larger(largest, inputs * taps));
  REAL *b = malloc(sizeof(REAL) * inputs * ax[0].n * ax[1].k * ax[2].k);
  int failed = !field || !a || !b;
  if (!failed) {
    NAME(images_t) s = {x, field, m->samples, size};
    parallel_for(0, ceiling(size, CHUNK), WORTH_A_THREAD / (CHUNK * m->samples) + 1, NAME(sum_chunks), &s);
    NAME(along_t) s2 = {&ax[2], field, a, inner}, s1 = {&ax[1], a, b, inner * ax[2].k};
    NAME(along_t) s0 = {&ax[0], b, m->last ? a : mass, inner * ax[2].k * ax[1].k};
    parallel_for(0, outer * ax[0].n * ax[1].n, WORTH_A_THREAD / (ax[2].n * inner) + 1, NAME(gather), &s2);
    parallel_for(0, outer * ax[0].n, WORTH_A_THREAD / (ax[1].n * s1.inner) + 1, NAME(gather), &s1);
    NAME(gather)(0, outer, &s0);
    for (int64_t c = 0; m->last && c < inputs; c++)
      for (int64_t t = 0; t < taps; t++) mass[c * taps + t] = a[t * inputs + c];
    for (int64_t j = 0; j < inputs * taps; j++) mass[j] = (REAL)(mass[j] / m->count);
  }
  free(field);
  free(a);
  free(b);
  return failed;
}

/* ---- What comes back by way of the mass, the same for every sample ---------------------------------------------- */

typedef struct {
  SAMPLE *dx;
  const REAL *pattern;
  int64_t length, period; /* pattern of this period, or (planes) one value for each run of this length */
  int64_t inputs;
} NAME(add_t);

FAST static void NAME(add_pattern)(SAMPLE *restrict dx, const REAL *restrict pattern, int64_t length) {
  for (int64_t i = 0; i < length; i++) dx[i] = WRITE(READ(dx[i]) + pattern[i]);
}

static void NAME(add_periods)(int64_t begin, int64_t end, void *context) {
  NAME(add_t) *s = context;
  for (int64_t b = begin; b < end; b++)
    NAME(add_pattern)(s->dx + b * s->period, s->pattern, smaller(s->period, s->length - b * s->period));
}

FAST static void NAME(add_constant)(SAMPLE *dx, REAL value, int64_t length) {
  for (int64_t i = 0; i < length; i++) dx[i] = WRITE(READ(dx[i]) + value);
}

static void NAME(add_planes)(int64_t begin, int64_t end, void *context) {
  NAME(add_t) *s = context;
  for (int64_t b = begin; b < end; b++)
    NAME(add_constant)(s->dx + b * s->period, s->pattern[b % s->inputs], s->period);
}

static int NAME(add_mass_gradient)(const samples_t *m, const REAL *dmass) {
  const axis_t *ax = m->axes;
  int64_t inputs = m->inputs, space = ax[0].n * ax[1].n * ax[2].n, size = inputs * space, length = m->samples * size;
  int64_t taps = m->position ? ax[0].k * ax[1].k * ax[2].k : 1, inner = m->last ? inputs : 1;
  int64_t outer = m->last ? 1 : inputs;
  int64_t period = m->position ? size : m->last ? inputs * larger(1, 1024 / inputs) : space;
  REAL *per_input = malloc(sizeof(REAL) * inputs * taps), *pattern = 0, *a = 0, *b = 0;
  int failed = !per_input;
  for (int64_t c = 0; !failed && c < inputs; c++)
    for (int64_t t = 0; t < taps; t++)
      per_input[m->last ? t * inputs + c : c * taps + t] = (REAL)(dmass[c * taps + t] / m->count);
  if (!failed && m->position) {
    a = malloc(sizeof(REAL) * inputs * ax[0].n * ax[1].k * ax[2].k);
    b = malloc(sizeof(REAL) * inputs * ax[0].n * ax[1].n * ax[2].k);
    pattern = malloc(sizeof(REAL) * size);
    failed = !a || !b || !pattern;
    if (!failed) {
      NAME(along_t) s0 = {&ax[0], per_input, a, inner * ax[2].k * ax[1].k};
      NAME(along_t) s1 = {&ax[1], a, b, inner * ax[2].k}, s2 = {&ax[2], b, pattern, inner};
      NAME(scatter)(0, outer, &s0);
      NAME(scatter)(0, outer * ax[0].n, &s1);
      parallel_for(0, outer * ax[0].n * ax[1].n, WORTH_A_THREAD / (ax[2].n * inner) + 1, NAME(scatter), &s2);
    }
  } else if (!failed && m->last) {
    pattern = malloc(sizeof(REAL) * period);
    failed = !pattern;
    for (int64_t j = 0; !failed && j < period; j++) pattern[j] = per_input[j % inputs];
  }
  if (!failed) {
    NAME(add_t) s = {P(SAMPLE, m->x), pattern ? pattern : per_input, length, period, inputs};
    parallel_for(0, ceiling(length, period), WORTH_A_THREAD / larger(1, period) + 1,
                 pattern ? NAME(add_periods) : NAME(add_planes), &s);
  }
  free(per_input);
  free(pattern);
  free(a);
  free(b);
  return failed;
}

/* ---- Balance ---------------------------------------------------------------------------------------------------- */

/* The rule of balance.py for what counts as more than rounding error. */
static int NAME(counts)(REAL value, REAL magnitude, int64_t terms) {
  REAL floor = (REAL)(fabs((double)magnitude) * (4 * EPSILON * sqrt((double)terms)));
  REAL size = value < 0 ? -value : value;
  return size > (floor < SMALLEST ? SMALLEST : floor) && size <= LARGEST;
}

typedef struct {
  const REAL *w, *gain, *scale;
  SAMPLE *effective;
  REAL *share, *inverse_total, *mean, *positive, *inverse_contribution;
  REAL *g, *dgain, *columns; /* backward only */
  int64_t n, rows_per_group, rows_per_block, blocks_per_group, one_pass;
} NAME(rows_t);

static NAME(rows_t) NAME(unpack)(const rows_t *r) {
  NAME(rows_t) s = {P(const REAL, r->weight), P(const REAL, r->gain), P(const REAL, r->scale),
                    P(SAMPLE, r->effective), P(REAL, r->share), P(REAL, r->inverse_total),
                    P(REAL, r->mean), P(REAL, r->positive), P(REAL, r->inverse_contribution),
                    0, 0, 0, r->inputs * r->taps, r->outputs / r->groups, 0, 0, r->one_pass};
  s.rows_per_block = larger(32, ceiling(s.rows_per_group, MOST_BLOCKS));
  s.blocks_per_group = ceiling(s.rows_per_group, s.rows_per_block);
  return s;
}

static REAL NAME(full_gain)(const NAME(rows_t) *s, int64_t d) {
  return (s->gain ? s->gain[d] : 1) * (s->scale ? *s->scale : 1);
}

FAST static void NAME(scale_row)(const REAL *restrict w, SAMPLE *restrict out, int64_t n, REAL mean,
                                 REAL inverse_contribution, REAL factor) {
  for (int64_t i = 0; i < n; i++) out[i] = WRITE((w[i] - mean) * inverse_contribution * factor);
}

/* mean = sum p w; positive = sum p I, contribution = sum p (w - centre) I with I = [w > threshold]. Runs are short, as
   in sum_periods. */
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

static void NAME(measure_row)(const REAL *w, const REAL *p, int64_t n, int64_t one_pass, REAL *mean_, REAL *positive_,
                              REAL *contribution_) {
  double mean, positive, contribution;
  NAME(sum_row)(w, p, n, 0, 0, &mean, &positive, &contribution);
  if (one_pass) {
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
    int64_t group = d / s->rows_per_group;
    const REAL *w = s->w + d * s->n;
    REAL contribution;
    NAME(measure_row)(w, s->share + group * s->n, s->n, s->one_pass, s->mean + d, s->positive + d, &contribution);
    s->inverse_contribution[d] = NAME(counts)(contribution, s->mean[d], s->n) ? 1 / contribution : 0;
    NAME(scale_row)(w, s->effective + d * s->n, s->n, s->mean[d], s->inverse_contribution[d],
                    s->inverse_total[group] * NAME(full_gain)(s, d));
  }
}

static void NAME(scale_rows)(int64_t begin, int64_t end, void *context) {
  NAME(rows_t) *s = context;
  for (int64_t d = begin; d < end; d++)
    NAME(scale_row)(s->w + d * s->n, s->effective + d * s->n, s->n, s->mean[d], s->inverse_contribution[d],
                    s->inverse_total[d / s->rows_per_group] * NAME(full_gain)(s, d));
}

static void NAME(track)(const forward_t *f, const REAL *mass) {
  const rows_t *r = &f->rows;
  REAL *running = P(REAL, f->running), total = 0;
  int64_t *batches = P(int64_t, f->batches), inputs = r->inputs * r->groups, taps = r->position ? r->taps : 1;
  for (int64_t j = 0; j < inputs * taps; j++) total += mass[j];
  if (!(fabs((double)total) <= LARGEST)) return;
  *batches += 1;
  REAL plain = (REAL)1 / *batches, rate = (REAL)f->momentum > plain ? (REAL)f->momentum : plain;
  for (int64_t c = 0; c < inputs; c++)
    for (int64_t t = 0; t < taps; t++) {
      REAL *value = running + c * f->running_input + t * f->running_tap;
      REAL change = mass[c * taps + t] - *value; /* as torch.lerp: from the nearer end, so that a rate of 1 copies */
      *value = rate < (REAL)0.5 ? *value + rate * change : mass[c * taps + t] - change * (1 - rate);
    }
}

/* Mass, its moving average, its shares, and all rows. */
EXPORT int NAME(balnorm_forward)(const forward_t *f) {
  const rows_t *r = &f->rows;
  NAME(rows_t) s = NAME(unpack)(r);
  const REAL *mass = P(const REAL, f->mass);
  int64_t inputs = r->inputs, taps = r->taps, stored = r->position ? taps : 1;
  if (f->samples.x && (r->position ? NAME(position_mass) : NAME(channel_mass))(&f->samples)) return 1;
  if (f->running) NAME(track)(f, mass);
  for (int64_t group = 0; group < r->groups; group++) {
    const REAL *m = mass + group * inputs * stored;
    REAL *p = s.share + group * s.n;
    double exact = 0, magnitude = 0; /* in double: added one by one, floats lose more than the rule for zero allows */
    for (int64_t c = 0; c < inputs; c++)
      for (int64_t t = 0; t < taps; t++) {
        REAL value = m[c * stored + (r->position ? t : 0)];
        p[r->last ? t * inputs + c : c * taps + t] = value;
      }
    for (int64_t i = 0; i < s.n; i++) {
      exact += p[i];
      magnitude += fabs((double)p[i]);
    }
    REAL total = (REAL)exact;
    if (NAME(counts)(total, (REAL)magnitude, s.n)) {
      REAL inverse = 1 / total, most = LARGEST * EPSILON;
      s.inverse_total[group] = inverse > most ? most : inverse < -most ? -most : inverse;
      for (int64_t i = 0; i < s.n; i++) p[i] = p[i] / total;
    } else {
      s.inverse_total[group] = 0;
      memset(p, 0, sizeof(REAL) * s.n);
    }
  }
  parallel_for(0, r->outputs, WORTH_A_THREAD / larger(1, s.n) + 1, NAME(balance_rows), &s);
  return 0;
}

/* The effective weight once more, from what balnorm_forward left. */
EXPORT int NAME(balnorm_effective)(const rows_t *r) {
  NAME(rows_t) s = NAME(unpack)(r);
  parallel_for(0, r->outputs, WORTH_A_THREAD / larger(1, s.n) + 1, NAME(scale_rows), &s);
  return 0;
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

FAST static void NAME(backward_row)(REAL *restrict g, const REAL *restrict w, const REAL *restrict p,
                                    REAL *restrict columns, int64_t n, REAL mean, REAL inverse_contribution,
                                    REAL factor, REAL threshold, REAL db, REAL u) {
  for (int64_t i = 0; i < n; i++) {
    REAL q = db + (w[i] > threshold ? u : 0), v = (w[i] - mean) * inverse_contribution;
    g[i] = (g[i] * factor - p[i] * q) * inverse_contribution;
    columns[i] += v * q;
  }
}

static void NAME(backward_blocks)(int64_t begin, int64_t end, void *context) {
  NAME(rows_t) *s = context;
  for (int64_t b = begin; b < end; b++) {
    int64_t group = b / s->blocks_per_group, first = (b % s->blocks_per_group) * s->rows_per_block;
    int64_t last = smaller(s->rows_per_group, first + s->rows_per_block), n = s->n;
    for (int64_t row = first; row < last; row++) {
      int64_t d = group * s->rows_per_group + row;
      const REAL *w = s->w + d * n;
      REAL *g = s->g + d * n, mean = s->mean[d], inverse_contribution = s->inverse_contribution[d], sum, sum_v;
      REAL inverse_total = s->inverse_total[group], gain = NAME(full_gain)(s, d);
      NAME(project_row)(g, w, n, mean, inverse_contribution, &sum, &sum_v);
      s->dgain[d] = sum_v * inverse_total * (s->scale ? *s->scale : 1);
      REAL u = sum_v * inverse_total * gain, db = sum * inverse_total * gain - u * s->positive[d];
      NAME(backward_row)(g, w, s->share + group * n, s->columns + b * n, n, mean, inverse_contribution,
                         inverse_total * gain, s->one_pass ? 0 : mean, db, u);
    }
  }
}

EXPORT int NAME(balnorm_backward)(const backward_t *a) {
  const rows_t *r = &a->rows;
  NAME(rows_t) s = NAME(unpack)(r);
  int64_t blocks = r->groups * s.blocks_per_group, inputs = r->inputs, taps = r->taps;
  int64_t masses = r->groups * inputs * (r->position ? taps : 1);
  s.g = P(REAL, a->g);
  s.dgain = P(REAL, a->dgain);
  s.columns = calloc(blocks * s.n + masses, sizeof(REAL));
  if (!s.columns) return 1;
  parallel_for(0, blocks, WORTH_A_THREAD / larger(1, s.n * smaller(s.rows_per_group, s.rows_per_block)) + 1,
               NAME(backward_blocks), &s);
  REAL *dmass = a->dmass ? P(REAL, a->dmass) : s.columns + blocks * s.n;
  for (int64_t group = 0; group < r->groups; group++) {
    REAL *columns = s.columns + group * s.blocks_per_group * s.n;
    for (int64_t b = 1; b < s.blocks_per_group; b++) NAME(add_to)(columns, columns + b * s.n, s.n);
    for (int64_t c = 0; c < inputs; c++) {
      REAL sum = 0;
      for (int64_t t = 0; t < taps; t++) {
        REAL value = columns[r->last ? t * inputs + c : c * taps + t];
        if (r->position)
          dmass[(group * inputs + c) * taps + t] = -value * s.inverse_total[group];
        else
          sum += value;
      }
      if (!r->position) dmass[group * inputs + c] = -sum * s.inverse_total[group];
    }
  }
  int failed = a->samples.x ? NAME(add_mass_gradient)(&a->samples, dmass) : 0;
  free(s.columns);
  return failed;
}

#endif

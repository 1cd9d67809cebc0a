#include "vectors_plain.h"
#include "attention.h"
#include "hadamard.h"
#include "low_bit.h"

static const LinearKernels linear = {ROWS_ARE_FP32, prepare, multiply, prepare_low, multiply_low, turn, hadamard};
const Kernels plain_kernels = {few_rows, scratch_bytes, attend, read, &linear};

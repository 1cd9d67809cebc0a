#include "vectors_plain.h"
#include "attention.h"
#include "low_bit.h"

const Kernels plain_kernels = {scratch_bytes, attend, read};
const LinearKernels plain_linear = {ROWS_ARE_FP32, prepare, multiply, prepare_low, multiply_low, turn};

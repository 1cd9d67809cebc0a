#include "vectors_avx512.h"
#include "attention.h"

const Kernels avx512_bf16_kernels = {scratch_bytes, attend, read};

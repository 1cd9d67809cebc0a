#include "vectors_avx512.h"
#include "attention.h"

const Kernels avx512_kernels = {scratch_bytes, attend, read};

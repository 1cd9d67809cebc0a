#include "vectors_avx2.h"
#include "attention.h"

const Kernels avx2_kernels = {scratch_bytes, attend, read};

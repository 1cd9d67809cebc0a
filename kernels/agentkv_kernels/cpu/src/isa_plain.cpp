#include "vectors_plain.h"
#include "attention.h"

const Kernels plain_kernels = {scratch_bytes, attend, read};

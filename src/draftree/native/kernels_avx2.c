/* Kernels for processors with AVX2. */
#include "rows.h"

#if X86
KERNELS(avx2, __attribute__((target("avx2,fma"))), 8, product_avx2)

Kernels kernels_avx2(void) { return all_avx2; }
#endif

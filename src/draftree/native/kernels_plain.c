/* Kernels for any processor. */
#include "rows.h"

KERNELS(plain, , 4, product_plain)

Kernels kernels_plain(void) { return all_plain; }

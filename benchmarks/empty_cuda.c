/* A CUDA whose launches do nothing and are counted: what is left of a call is the host's part of it.
 * Only the functions that an artefact's library imports (src/blockscale/launch/runtime.c); `fail` makes launches fail.
 */
#include <stdint.h>

long launches;
int fail, devices = 1, sets, libraries, forgotten;

int cudaLibraryLoadData(void **library, const void *image, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    (void)image, (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
    *library = (void *)(intptr_t)++libraries;
    return 0;
}
int cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
    (void)name;
    *kernel = library;
    return 0;
}
int cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
    (void)kernel, (void)attribute, (void)value, (void)device;
    sets++;
    return 0;
}
int cudaFuncSetAttribute(const void *kernel, int attribute, int value) {
    (void)kernel, (void)attribute, (void)value;
    return 0;
}
int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    (void)attribute, (void)device;
    *value = 232448;
    return 0;
}
int cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
    (void)attribute, (void)kernel, (void)device;
    *value = 0;
    return 0;
}
int cudaGetDevice(int *device) { return *device = 0; }
int cudaSetDevice(int device) { return (void)device, 0; }
int cudaGetDeviceCount(int *count) { return *count = devices, 0; }
int cudaLaunchKernelExC(const void *config, const void *kernel, void **parameters) {
    (void)config, (void)kernel, (void)parameters;
    launches++;
    return fail;
}
int cudaGetLastError(void) { return forgotten++, 0; }
const char *cudaGetErrorName(int status) { return (void)status, "cudaErrorInvalidValue"; }
const char *cudaGetErrorString(int status) { return (void)status, "invalid argument"; }

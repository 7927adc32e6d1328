/* The entry points that host code compiled by CuTe DSL imports, on top of the CUDA runtime: linked into an artefact's
 * library, it makes the library need nothing but CUDA and TVM-FFI, so that it runs where the compiler is not installed.
 *
 * The names are those of CuTe DSL 4.8.1. Types of CUDA are written out, so that no header is needed: handles are
 * pointers, a status is an int. The symbols of CUDA itself are resolved when the library is loaded (cuda.py).
 */
#include <stdint.h>

int cudaLibraryLoadData(void **library, const void *image, void *jit_options, void *jit_values, unsigned jit_count,
                        void *options, void *values, unsigned count);
int cudaLibraryGetKernel(void **kernel, void *library, const char *name);
int cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device);
int cudaFuncSetAttribute(const void *kernel, int attribute, int value);
int cudaDeviceGetAttribute(int *value, int attribute, int device);
int cudaGetDevice(int *device);
int cudaGetDeviceCount(int *count);
int cudaSetDevice(int device);
int cudaLaunchKernelExC(const void *config, const void *kernel, void **parameters);
int cudaGetLastError(void);
const char *cudaGetErrorName(int status);
const char *cudaGetErrorString(int status);
int cuKernelGetAttribute(int *value, int attribute, void *kernel, int device);

#define LOCAL __attribute__((visibility("hidden")))

/* The error goes to the caller; CUDA is to forget it, or the next library to ask for the last error would report it. */
static int32_t told(int32_t status) {
    if (status)
        cudaGetLastError();
    return status;
}

LOCAL int32_t _cudaLibraryLoadData(void **library, const void *image, void *jit_options, void *jit_values,
                                   uint32_t jit_count, void *options, void *values, uint32_t count) {
    return told(cudaLibraryLoadData(library, image, jit_options, jit_values, jit_count, options, values, count));
}

LOCAL int32_t _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
    return told(cudaLibraryGetKernel(kernel, library, name));
}

LOCAL int32_t _cuKernelGetAttribute(int32_t *value, int32_t attribute, void *kernel, int32_t device) {
    return cuKernelGetAttribute(value, attribute, kernel, device);
}

LOCAL int32_t _cudaKernelSetAttributeForDevice(void *kernel, int32_t attribute, int32_t value, int32_t device) {
    return told(cudaKernelSetAttributeForDevice(kernel, attribute, value, device));
}

LOCAL int32_t _cudaFuncSetAttribute(void *kernel, int32_t attribute, int32_t value) {
    return told(cudaFuncSetAttribute(kernel, attribute, value));
}

LOCAL int32_t _cudaDeviceGetAttribute(int32_t *value, int32_t attribute, int32_t device) {
    return told(cudaDeviceGetAttribute(value, attribute, device));
}

LOCAL int32_t _cudaGetDevice(int32_t *device) { return told(cudaGetDevice(device)); }

LOCAL int32_t _cudaSetDevice(int32_t device) { return told(cudaSetDevice(device)); }

LOCAL int32_t _cudaLaunchKernelEx(const void *config, void *kernel, void **parameters) {
    return told(cudaLaunchKernelExC(config, kernel, parameters));
}

/* Loads the kernels once a process, and sets their attributes on every device. Two threads may both load; the second
 * library is then never used. */
LOCAL int32_t cuda_dialect_init_library_once(void **slot, int32_t (*init)(void **), int32_t (*load)(void **, int32_t),
                                             void (*raise)(const char *kind, const char *message)) {
    if (__atomic_load_n(slot, __ATOMIC_ACQUIRE))
        return 0;
    void *library = 0, *empty = 0;
    int devices = 0;
    int32_t status = cudaGetDeviceCount(&devices);
    if (!status)
        status = init(&library);
    for (int device = 0; !status && load && device < devices; device++)
        status = load(&library, device);
    if (told(status)) {
        raise("RuntimeError", cudaGetErrorString(status));
        return -1;
    }
    __atomic_compare_exchange_n(slot, &empty, library, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return 0;
}

/* Called when the process ends, when CUDA may have gone: the driver unloads what is left. */
LOCAL void cuda_dialect_unload_library_once(void **slot) { __atomic_store_n(slot, (void *)0, __ATOMIC_RELEASE); }

LOCAL void CuteDSLRT_TVMFFISetRaisedCudaError(void (*raise)(const char *kind, const char **parts, int32_t count),
                                              int32_t status) {
    const char *parts[] = {cudaGetErrorName(status), ": ", cudaGetErrorString(status)};
    raise("RuntimeError", parts, 3);
}

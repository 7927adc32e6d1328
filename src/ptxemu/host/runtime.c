/* The entry points that host code compiled by CuTe DSL imports, answered by ptxemu instead of a GPU.
 *
 * Their names begin with `em` where the originals have `cu` (imports.py): CuTe DSL's own library, which may be loaded in
 * the same process, would be found first under those.
 *
 * Every call goes to a table of functions that the Python side installs (bridge.py, `Answers`, has the same layout).
 * Handles are small integers that Python chose.  A status is a cudaError_t: 0 is success, everything else makes the
 * compiled function return at once.
 */
#include <stdint.h>

#define NOT_READY 3        /* cudaErrorInitializationError */
#define INVALID_DEVICE 101 /* cudaErrorInvalidDevice: there is one, number 0 */

struct answers {
    int32_t (*load_library)(void **library, const void *image);
    int32_t (*get_kernel)(void **kernel, void *library, const char *name);
    int32_t (*get_attribute)(int32_t *value, int32_t attribute, void *kernel);
    int32_t (*set_attribute)(void *kernel, int32_t attribute, int32_t value);
    int32_t (*device_attribute)(int32_t *value, int32_t attribute);
    int32_t (*launch)(const void *config, void *kernel, void **parameters);
    const char *(*message)(int32_t status);
};

static struct answers answers;

void ptxemu_answer(const struct answers *given) { answers = *given; }

int32_t _emdaLibraryLoadData(void **library, const void *image, void *jit_options, void *jit_values, uint32_t jit_count,
                             void *options, void *values, uint32_t count) {
    (void)jit_options, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
    return answers.load_library ? answers.load_library(library, image) : NOT_READY;
}

int32_t _emdaLibraryGetKernel(void **kernel, void *library, const char *name) {
    return answers.get_kernel ? answers.get_kernel(kernel, library, name) : NOT_READY;
}

int32_t _emKernelGetAttribute(int32_t *value, int32_t attribute, void *kernel, int32_t device) {
    (void)device;
    return answers.get_attribute ? answers.get_attribute(value, attribute, kernel) : NOT_READY;
}

int32_t _emdaKernelSetAttributeForDevice(void *kernel, int32_t attribute, int32_t value, int32_t device) {
    (void)device;
    return answers.set_attribute ? answers.set_attribute(kernel, attribute, value) : NOT_READY;
}

int32_t _emdaFuncSetAttribute(void *kernel, int32_t attribute, int32_t value) {
    return answers.set_attribute ? answers.set_attribute(kernel, attribute, value) : NOT_READY;
}

int32_t _emdaDeviceGetAttribute(int32_t *value, int32_t attribute, int32_t device) {
    (void)device;
    return answers.device_attribute ? answers.device_attribute(value, attribute) : NOT_READY;
}

int32_t _emdaGetDevice(int32_t *device) {
    *device = 0;
    return 0;
}

int32_t _emdaSetDevice(int32_t device) { return device ? INVALID_DEVICE : 0; }

int32_t _emdaLaunchKernelEx(const void *config, void *kernel, void **parameters) {
    return answers.launch ? answers.launch(config, kernel, parameters) : NOT_READY;
}

/* Two threads may both load; the second library is then never used.  A lock would be taken while Python is entered. */
int32_t emda_dialect_init_library_once(void **slot, int32_t (*init)(void **), int32_t (*load)(void **, int32_t),
                                       void (*raise)(const char *kind, const char *message)) {
    if (__atomic_load_n(slot, __ATOMIC_ACQUIRE))
        return 0;
    void *library = 0, *empty = 0;
    int32_t status = init(&library);
    if (!status && load)
        status = load(&library, 0);
    if (status) {
        raise("RuntimeError", answers.message ? answers.message(status) : "ptxemu is not installed");
        return -1;
    }
    __atomic_compare_exchange_n(slot, &empty, library, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return 0;
}

void emda_dialect_unload_library_once(void **slot) { __atomic_store_n(slot, (void *)0, __ATOMIC_RELEASE); }

void EmteDSLRT_TVMFFISetRaisedCudaError(void (*raise)(const char *kind, const char **parts, int32_t count),
                                        int32_t status) {
    const char *part = answers.message ? answers.message(status) : "ptxemu is not installed";
    raise("RuntimeError", &part, 1);
}

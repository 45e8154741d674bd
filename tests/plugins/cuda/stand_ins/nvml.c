/* NVML as its API reference documents the calls that the plugin makes: two GPUs, or an error of nvmlInit.
 *
 * nvml.h: nvmlReturn_t is an enum (0 = NVML_SUCCESS, 2 = NVML_ERROR_INVALID_ARGUMENT, 7 = NVML_ERROR_INSUFFICIENT_SIZE);
 * nvmlDevice_t is a pointer; nvmlSystemGetCudaDriverVersion_v2 gives 1000 * major + 10 * minor; texts end with a 0.
 */
#include <stdlib.h>
#include <string.h>

typedef struct { const char *name, *uuid; int major, minor; } Device;
static Device devices[] = {
    {"NVIDIA H200", "GPU-11111111-aaaa-bbbb-cccc-000000000001", 9, 0},
    {"Tesla V100-SXM2-32GB", "GPU-22222222-aaaa-bbbb-cccc-000000000002", 7, 0},
};
static int users = 0;

static int text(const char *value, char *buffer, unsigned length) {
    if (length < strlen(value) + 1) return 7;
    strcpy(buffer, value);
    return 0;
}

const char *nvmlErrorString(int status) { return status == 18 ? "Driver/library version mismatch" : "Invalid Argument"; }

int nvmlInit_v2(void) {
    const char *status = getenv("STAND_IN_NVML_INIT");
    if (status) return atoi(status);
    users++;
    return 0;
}

int nvmlShutdown(void) { return --users; }

int nvmlSystemGetDriverVersion(char *buffer, unsigned length) { return users == 1 ? text("570.86.15", buffer, length) : 1; }

int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 12080; return 0; }

int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if (index > 1) return 2;
    *device = &devices[index];
    return 0;
}

int nvmlDeviceGetName(void *device, char *buffer, unsigned length) { return text(((Device *)device)->name, buffer, length); }

int nvmlDeviceGetUUID(void *device, char *buffer, unsigned length) { return text(((Device *)device)->uuid, buffer, length); }

int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    *major = ((Device *)device)->major;
    *minor = ((Device *)device)->minor;
    return 0;
}

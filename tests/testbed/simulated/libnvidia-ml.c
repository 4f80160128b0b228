/* Simulated libnvidia-ml.so.1: a test host's simulated GPUs, as the driver's management library shows them.
 *
 * Which GPUs there are: $SIMULATED_GPU_ROOT/etc/simulated-gpu/gpus, one line each:
 *   index|name|uuid|memory_total_mib|compute_capability|driver_version
 * What is in use: $SIMULATED_GPU_ROOT/run/simulated-gpu/holds/<pid>, lines "<gpu index> <MiB>", counted while that
 * process lives. No file of GPUs, no driver.
 *
 * cc -shared -fPIC -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 libnvidia-ml.c
 */
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       DRIVER_NOT_LOADED = 9 };

#define MAX_GPUS 16
#define MIB (1024ULL * 1024ULL)
#define IDLE_MIB 1ULL

struct gpu { unsigned index; char name[96], uuid[96], driver[80]; unsigned long long total_mib; int major, minor; };
struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };

static struct gpu gpus[MAX_GPUS];
static unsigned gpu_count;

static void path_of(char *into, size_t size, const char *path) {
    const char *root = getenv("SIMULATED_GPU_ROOT");
    snprintf(into, size, "%s%s", root ? root : "", path);
}

static int read_gpus(void) {
    char path[4096], line[512];
    path_of(path, sizeof path, "/etc/simulated-gpu/gpus");
    FILE *file = fopen(path, "re");
    if (!file)
        return DRIVER_NOT_LOADED;
    gpu_count = 0;
    while (gpu_count < MAX_GPUS && fgets(line, sizeof line, file)) {
        struct gpu *gpu = &gpus[gpu_count];
        if (sscanf(line, "%u|%95[^|]|%95[^|]|%llu|%d.%d|%79[^|\n]", &gpu->index, gpu->name, gpu->uuid,
                   &gpu->total_mib, &gpu->major, &gpu->minor, gpu->driver) == 7)
            gpu_count++;
    }
    fclose(file);
    return gpu_count ? SUCCESS : DRIVER_NOT_LOADED;
}

/* A process that another user may not see (hidepid) answers EPERM and lives; a zombie has given its memory back. */
static int alive(pid_t pid) {
    char path[64], stat[1024];
    if (kill(pid, 0) != 0 && errno != EPERM)
        return 0;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *file = fopen(path, "re");
    if (!file)
        return 1;
    size_t length = fread(stat, 1, sizeof stat - 1, file);
    fclose(file);
    stat[length] = 0;
    char *end = strrchr(stat, ')');
    return !(end && (end[1] == ' ') && (end[2] == 'Z' || end[2] == 'X'));
}

static unsigned long long held_mib(unsigned index) {
    char path[4096], file_path[4400], line[128];
    unsigned long long held = 0;
    path_of(path, sizeof path, "/run/simulated-gpu/holds");
    DIR *directory = opendir(path);
    if (!directory)
        return 0;
    for (struct dirent *entry; (entry = readdir(directory));) {
        char *end;
        long pid = strtol(entry->d_name, &end, 10);
        if (pid <= 0 || *end || !alive((pid_t)pid))
            continue;
        snprintf(file_path, sizeof file_path, "%s/%s", path, entry->d_name);
        FILE *file = fopen(file_path, "re");
        if (!file)
            continue;
        unsigned gpu;
        unsigned long long mib;
        while (fgets(line, sizeof line, file))
            if (sscanf(line, "%u %llu", &gpu, &mib) == 2 && gpu == index)
                held += mib;
        fclose(file);
    }
    closedir(directory);
    return held;
}

static int copy(const char *text, char *into, unsigned length) {
    if (strlen(text) + 1 > length)
        return INSUFFICIENT_SIZE;
    strcpy(into, text);
    return SUCCESS;
}

int nvmlInit_v2(void) { return read_gpus(); }
int nvmlInit(void) { return read_gpus(); }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return read_gpus(); }
int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int result) {
    switch (result) {
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    return gpu_count ? copy(gpus[0].driver, version, length) : UNINITIALIZED;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = gpu_count;
    return gpu_count ? SUCCESS : UNINITIALIZED;
}
int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct gpu **device) {
    for (unsigned i = 0; i < gpu_count; i++)
        if (gpus[i].index == index) {
            *device = &gpus[i];
            return SUCCESS;
        }
    return gpu_count ? INVALID_ARGUMENT : UNINITIALIZED;
}
int nvmlDeviceGetHandleByIndex(unsigned index, struct gpu **device) {
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, struct gpu **device) {
    for (unsigned i = 0; i < gpu_count; i++)
        if (strcmp(gpus[i].uuid, uuid) == 0) {
            *device = &gpus[i];
            return SUCCESS;
        }
    return gpu_count ? NOT_FOUND : UNINITIALIZED;
}

int nvmlDeviceGetIndex(struct gpu *device, unsigned *index) {
    *index = device->index;
    return SUCCESS;
}
int nvmlDeviceGetName(struct gpu *device, char *name, unsigned length) { return copy(device->name, name, length); }
int nvmlDeviceGetUUID(struct gpu *device, char *uuid, unsigned length) { return copy(device->uuid, uuid, length); }

int nvmlDeviceGetCudaComputeCapability(struct gpu *device, int *major, int *minor) {
    *major = device->major;
    *minor = device->minor;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(struct gpu *device, struct memory *memory) {
    unsigned long long used = IDLE_MIB + held_mib(device->index);
    if (used > device->total_mib)
        used = device->total_mib;
    memory->total = device->total_mib * MIB;
    memory->used = used * MIB;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(struct gpu *device, struct memory_v2 *memory) {
    struct memory plain;
    nvmlDeviceGetMemoryInfo(device, &plain);
    memory->total = plain.total;
    memory->reserved = 0;
    memory->free = plain.free;
    memory->used = plain.used;
    return SUCCESS;
}

/* No NVLink and no peer-to-peer between the simulated cards: NVML_P2P_STATUS_NOT_SUPPORTED. */
int nvmlDeviceGetP2PStatus(struct gpu *device1, struct gpu *device2, int index, int *status) {
    (void)device1, (void)device2, (void)index;
    *status = 5;
    return SUCCESS;
}

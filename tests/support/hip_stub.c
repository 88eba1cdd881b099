/* A stand-in for AMD's HIP runtime (libamdhip64.so.7) over host memory, so that tests drive the real CuPy for ROCm
 * without a GPU. Compiled thrice, under the names of the three libraries of ROCm that CuPy's runtime module needs.
 *
 * HIP_STUB_CARDS: PCI addresses, comma-separated (default: none, and hipGetDeviceCount answers hipErrorNoDevice).
 * HIP_STUB_BYTES: memory of each card (default 64 MiB).
 */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_HANDLE = 400,
       PEER_ALREADY = 704, PEER_NOT_ENABLED = 705, NOT_SUPPORTED = 801 };
enum { CARDS = 8, BLOCKS = 4096, STREAMS = 4096 };

typedef struct { char *start; size_t size; int device; } block; /* device -1: pinned on the host */
typedef struct { int device; int used; } stream;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int current;
static char addresses[CARDS][16];
static int count = -1;
static size_t capacity = 64u << 20;
static block blocks[BLOCKS];
static stream streams[STREAMS];
static int peers[CARDS][CARDS];

static int cards(void)
{
    pthread_mutex_lock(&lock);
    if (count < 0) {
        const char *list = getenv("HIP_STUB_CARDS"), *bytes = getenv("HIP_STUB_BYTES");
        if (bytes)
            capacity = strtoull(bytes, NULL, 10);
        for (count = 0; list && *list && count < CARDS; count++) {
            size_t length = strcspn(list, ",");
            snprintf(addresses[count], sizeof addresses[count], "%.*s", (int)length, list);
            list += length + (list[length] == ',');
        }
    }
    pthread_mutex_unlock(&lock);
    return count;
}

/* What the range lies in: NULL for ordinary memory, and *bad where it runs over an end. */
static block *owner(const void *place, size_t size, int *bad)
{
    for (int n = 0; n < BLOCKS; n++) {
        block *b = &blocks[n];
        if (b->start && (const char *)place >= b->start && (const char *)place < b->start + b->size) {
            *bad |= (const char *)place + size > b->start + b->size;
            return b;
        }
    }
    return NULL;
}

static int allocate(void **place, size_t size, int device)
{
    int status = OUT_OF_MEMORY, gap = -1;
    size_t used = 0;
    pthread_mutex_lock(&lock);
    for (int n = 0; n < BLOCKS; n++) {
        if (!blocks[n].start)
            gap = n;
        else if (blocks[n].device == device)
            used += blocks[n].size;
    }
    if (gap >= 0 && size <= capacity - used && (*place = malloc(size))) {
        blocks[gap] = (block){*place, size, device};
        status = SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

static int release(void *place, int pinned)
{
    int bad = 0, status = INVALID_VALUE;
    pthread_mutex_lock(&lock);
    block *b = owner(place, 1, &bad);
    if (b && b->start == place && (b->device < 0) == pinned) {
        free(place);
        b->start = NULL;
        status = SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

static int copied(void *to, const void *from, size_t size, int to_device, int from_device)
{
    int bad = 0;
    pthread_mutex_lock(&lock);
    block *target = owner(to, size, &bad), *source = owner(from, size, &bad);
    int target_device = target ? target->device : -1, source_device = source ? source->device : -1;
    pthread_mutex_unlock(&lock);
    if (bad || target_device != to_device || source_device != from_device)
        return INVALID_VALUE;
    memmove(to, from, size);
    return SUCCESS;
}

static int known(void *handle)
{
    uintptr_t n = (uintptr_t)handle;
    return n > 0 && n < STREAMS && streams[n].used && streams[n].device == current;
}

int hipInit(unsigned flags) { return flags ? INVALID_VALUE : cards() ? SUCCESS : NO_DEVICE; }
int hipDriverGetVersion(int *version) { return *version = 70051831, SUCCESS; }
int hipRuntimeGetVersion(int *version) { return *version = 70051831, SUCCESS; }
int hipGetLastError(void) { return SUCCESS; }

int hipGetDeviceCount(int *n) { return (*n = cards()) ? SUCCESS : NO_DEVICE; }
int hipGetDevice(int *device) { return *device = current, SUCCESS; }
int hipSetDevice(int device) { return device < 0 || device >= cards() ? INVALID_DEVICE : (current = device, SUCCESS); }
int hipDeviceSynchronize(void) { return SUCCESS; }
int hipMemGetInfo(size_t *available, size_t *total)
{
    size_t used = 0;
    pthread_mutex_lock(&lock);
    for (int n = 0; n < BLOCKS; n++)
        used += blocks[n].start && blocks[n].device == current ? blocks[n].size : 0;
    pthread_mutex_unlock(&lock);
    return *total = capacity, *available = capacity - used, SUCCESS;
}

int hipDeviceGetPCIBusId(char *text, int length, int device)
{
    if (device < 0 || device >= cards() || length < 13)
        return INVALID_DEVICE;
    snprintf(text, length, "%s", addresses[device]);
    return SUCCESS;
}

/* hipDeviceProp_tR0600: what is asked of it is where it belongs, and all of it is written. */
typedef struct {
    char name[256], uuid[16], luid[8];
    unsigned luid_mask;
    size_t total, shared;
    int registers, warp;
    size_t pitch;
    int threads, threads_by_axis[3], grid[3], clock_khz;
    size_t constant;
    int major, minor;
    size_t texture_alignment, texture_pitch;
    int overlap, units, timeout, integrated;
    char between[1160 - 400];
    char architecture[256];
    char after[1472 - 1160 - 256];
} properties;
_Static_assert(offsetof(properties, between) == 400 && sizeof(properties) == 1472, "laid out as HIP 6 and 7 have it");

int hipGetDevicePropertiesR0600(properties *p, int device)
{
    if (device < 0 || device >= cards())
        return INVALID_DEVICE;
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "AMD Instinct MI210");
    snprintf(p->architecture, sizeof p->architecture, "gfx90a:sramecc+:xnack-");
    p->units = 104, p->total = capacity, p->warp = 64, p->threads = 1024, p->clock_khz = 1700000;
    return SUCCESS;
}

int hipMalloc(void **place, size_t size) { return allocate(place, size, current); }
int hipFree(void *place) { return release(place, 0); }
int hipHostMalloc(void **place, size_t size, unsigned flags)
{
    return flags == 1 ? allocate(place, size, -1) : INVALID_VALUE; /* hipHostMallocPortable */
}
int hipHostFree(void *place) { return release(place, 1); }

int hipStreamCreateWithFlags(void **handle, unsigned flags)
{
    int status = flags == 1 ? OUT_OF_MEMORY : INVALID_VALUE; /* hipStreamNonBlocking */
    pthread_mutex_lock(&lock);
    for (int n = 1; n < STREAMS && status == OUT_OF_MEMORY; n++)
        if (!streams[n].used) {
            streams[n] = (stream){current, 1};
            *handle = (void *)(uintptr_t)n;
            status = SUCCESS;
        }
    pthread_mutex_unlock(&lock);
    return status;
}
int hipStreamDestroy(void *handle)
{
    if (!known(handle))
        return INVALID_HANDLE;
    streams[(uintptr_t)handle].used = 0;
    return SUCCESS;
}
int hipStreamSynchronize(void *handle) { return known(handle) ? SUCCESS : INVALID_HANDLE; }

int hipMemcpyAsync(void *to, const void *from, size_t size, int kind, void *handle)
{
    if (!known(handle) || kind < 1 || kind > 3)
        return known(handle) ? INVALID_VALUE : INVALID_HANDLE;
    return copied(to, from, size, kind == 2 ? -1 : current, kind == 1 ? -1 : current);
}
int hipMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size, void *handle)
{
    if (!known(handle))
        return INVALID_HANDLE;
    if (!peers[from_device][to_device])
        return PEER_NOT_ENABLED;
    return copied(to, from, size, to_device, from_device);
}
int hipDeviceCanAccessPeer(int *can, int device, int peer) { return *can = device != peer, SUCCESS; }
int hipDeviceEnablePeerAccess(int peer, unsigned flags)
{
    if (flags || peer < 0 || peer >= cards() || peer == current)
        return INVALID_VALUE;
    if (peers[current][peer])
        return PEER_ALREADY;
    return peers[current][peer] = 1, SUCCESS;
}

const char *hipGetErrorName(int status)
{
    switch (status) {
    case OUT_OF_MEMORY: return "hipErrorOutOfMemory";
    case NO_DEVICE: return "hipErrorNoDevice";
    case INVALID_VALUE: return "hipErrorInvalidValue";
    default: return "hipErrorUnknown";
    }
}
const char *hipGetErrorString(int status)
{
    switch (status) {
    case OUT_OF_MEMORY: return "out of memory";
    case NO_DEVICE: return "no ROCm-capable device is detected";
    case INVALID_VALUE: return "invalid argument";
    default: return "unknown error";
    }
}

/* CuPy links these, and nothing here calls them. */
#define UNUSED(name) int name(void) { return NOT_SUPPORTED; }
UNUSED(hipCreateSurfaceObject) UNUSED(hipDestroySurfaceObject) UNUSED(hipDeviceDisablePeerAccess)
UNUSED(hipDeviceGetAttribute) UNUSED(hipDeviceGetByPCIBusId) UNUSED(hipDeviceGetLimit)
UNUSED(hipEventCreate) UNUSED(hipEventCreateWithFlags) UNUSED(hipEventDestroy) UNUSED(hipEventElapsedTime)
UNUSED(hipEventQuery) UNUSED(hipEventRecord) UNUSED(hipEventSynchronize) UNUSED(hipFuncGetAttribute)
UNUSED(hipGraphDebugDotPrint) UNUSED(hipGraphDestroy) UNUSED(hipGraphExecDestroy) UNUSED(hipGraphInstantiate)
UNUSED(hipGraphLaunch) UNUSED(hipIpcCloseMemHandle) UNUSED(hipIpcGetMemHandle) UNUSED(hipIpcOpenMemHandle)
UNUSED(hipLaunchHostFunc) UNUSED(hipMallocManaged) UNUSED(hipMemAdvise) UNUSED(hipMemPrefetchAsync)
UNUSED(hipMemcpy) UNUSED(hipMemcpyPeer) UNUSED(hipMemset) UNUSED(hipMemsetAsync) UNUSED(hipModuleGetFunction)
UNUSED(hipModuleGetGlobal) UNUSED(hipModuleLaunchKernel) UNUSED(hipModuleLoad) UNUSED(hipModuleLoadData)
UNUSED(hipModuleUnload) UNUSED(hipPointerGetAttributes) UNUSED(hipStreamAddCallback) UNUSED(hipStreamBeginCapture)
UNUSED(hipStreamCreate) UNUSED(hipStreamCreateWithPriority) UNUSED(hipStreamEndCapture)
UNUSED(hipStreamGetCaptureInfo) UNUSED(hipStreamGetCaptureInfo_v2) UNUSED(hipStreamGetFlags)
UNUSED(hipStreamGetPriority) UNUSED(hipStreamIsCapturing) UNUSED(hipStreamQuery) UNUSED(hipStreamWaitEvent)
UNUSED(roctracer_start) UNUSED(roctracer_stop)

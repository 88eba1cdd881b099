/* A stand-in for libnvidia-ml.so.1: the real nvidia-ml-py runs unchanged on top of it, without a GPU.
 *
 * The scenario is the content of the file $GPURT_TEST_NVML_FILE if that is set (read again at every call, so a
 * test can pull a card while a process runs), else $GPURT_TEST_NVML, else "ok2". $GPURT_TEST_NVML_LOG names a
 * file that gets one line for each init and shutdown that succeeded.
 *
 *   ok2          two H100                      ok1 / only_b  the first / the second of them alone
 *   swapped      the two in opposite order     empty         no device
 *   initN        nvmlInit fails with code N    allN          init is fine, every handle fails with code N
 *   hang         nvmlInit never returns        hang_field    temperature never returns
 *   segv / abort nvmlInit crashes              exit3         nvmlInit ends the process with code 3
 *   garbage      nvmlInit prints to stdout and ends the process with code 0
 *   noise        nvmlInit prints to stdout, then works
 *   forkchild    nvmlInit forks a child that keeps every descriptor, then ends the process with code 0
 *   lost1        handle of device 1 fails: 15  fallen1       device 1 has a handle, every field fails: 15
 *   remap1       device 1 waits for a reset to remap rows
 *   count_shrinks  the second count in a process, and every later one, is 1
 *   gb10         one GB10: no memory figures   orin          one Jetson: no figures at all
 *   mig          one H100 cut into two instances
 *   util999      utilisation fails with 999    noperm_field  temperature fails with 4
 *   nov2         no version 2 of memory info   absurd        values no card can have
 *   sentinel     "not available" marks in place of values
 */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#define MIB (1024ULL * 1024ULL)
#define OK 0
#define UNINITIALIZED 1
#define INVALID_ARGUMENT 2
#define NOT_SUPPORTED 3
#define NO_PERMISSION 4
#define NOT_FOUND 6
#define FUNCTION_NOT_FOUND 13
#define GPU_IS_LOST 15

typedef struct { unsigned long long total, free, used; } memory_v1;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2;
typedef struct { unsigned gpu, memory; } utilization;
typedef struct {
    char legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} pci_info;
typedef struct {
    unsigned multiprocessors, copy_engines, decoders, encoders, jpegs, ofas, gpu_slices, compute_slices;
    unsigned long long memory_mib;
} attributes;

typedef struct {
    const char *name, *uuid, *pci;
    unsigned long long total_mib, reserved_mib, used_mib;
    unsigned major, minor, cores, sm_mhz, max_sm_mhz, memory_mhz, bus_bits, celsius, milliwatt, gpu_percent;
    int instance; /* instance: GPU instance id of a partition, -1 for a whole card */
} card;

enum { A, B, GB10, ORIN, PARTITION0, PARTITION1 };
static card cards[] = {
    [A] = {"NVIDIA H100 80GB HBM3", "GPU-1a1a1a1a-0000-1111-2222-333333333333", "00000000:00:09.0",
           81559, 479, 0, 9, 0, 16896, 345, 1980, 2619, 5120, 41, 69850, 0, -1},
    [B] = {"NVIDIA H100 80GB HBM3", "GPU-2b2b2b2b-0000-1111-2222-444444444444", "00000000:00:0A.0",
           81559, 479, 8192, 9, 0, 16896, 1980, 1980, 2619, 5120, 63, 421500, 87, -1},
    [GB10] = {"NVIDIA GB10", "GPU-3c3c3c3c-0000-1111-2222-555555555555", "0000000F:01:00.0",
              0, 0, 0, 12, 1, 6144, 208, 3003, 0, 0, 35, 11170, 0, -1},
    [ORIN] = {"Orin (nvgpu)", "4d4d4d4d-0000-1111-2222-666666666666", "",
              0, 0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, -1},
    [PARTITION0] = {"NVIDIA H100 80GB HBM3 MIG 3g.40gb", "MIG-5e5e5e5e-0000-1111-2222-777777777777",
                    "00000000:00:09.0", 40448, 0, 59, 9, 0, 0, 345, 1980, 0, 0, 0, 0, 0, 2},
    [PARTITION1] = {"NVIDIA H100 80GB HBM3 MIG 2g.20gb", "MIG-6f6f6f6f-0000-1111-2222-888888888888",
                    "00000000:00:09.0", 20096, 0, 0, 9, 0, 0, 345, 1980, 0, 0, 0, 0, 0, 3},
};

static pid_t initialized_by;
static int references, counted;

static const char *scenario(void) {
    static __thread char text[64];
    const char *file = getenv("GPURT_TEST_NVML_FILE"), *env = getenv("GPURT_TEST_NVML");
    snprintf(text, sizeof text, "%s", env && *env ? env : "ok2");
    if (file && *file) {
        int fd = open(file, O_RDONLY);
        ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
        if (got > 0) text[got] = 0;
        if (fd >= 0) close(fd);
        text[strcspn(text, "\r\n ")] = 0;
    }
    return text;
}

static int is(const char *name) { return strcmp(scenario(), name) == 0; }

/* The code N of a scenario "prefixN", else 0. */
static int code(const char *prefix) {
    size_t n = strlen(prefix);
    return strncmp(scenario(), prefix, n) == 0 ? atoi(scenario() + n) : 0;
}

static void note(const char *what) {
    const char *file = getenv("GPURT_TEST_NVML_LOG");
    if (!file) return;
    FILE *f = fopen(file, "a");
    if (f) { fprintf(f, "%s %d\n", what, (int)getpid()); fclose(f); }
}

static void say(const char *text) { if (write(1, text, strlen(text)) < 0) abort(); }

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    if (code("init")) return code("init");
    if (is("hang")) for (;;) pause();
    if (is("segv")) { signal(SIGSEGV, SIG_DFL); *(volatile int *)0 = 1; }
    if (is("abort")) abort();
    if (is("exit3")) _exit(3);
    if (is("garbage")) { say("\xff NVRM: not an answer {\n"); _exit(0); }
    if (is("noise")) say("NVRM: chatter on standard output\n");
    if (is("forkchild")) {
        if (fork() == 0) for (;;) pause();
        _exit(0);
    }
    if (initialized_by != getpid()) { initialized_by = getpid(); references = 0; }
    references++;
    note("init");
    return OK;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

/* What a process inherits through fork is not initialised: the real library refuses it too. */
static int ready(void) { return initialized_by == getpid() && references > 0; }

int nvmlShutdown(void) {
    if (!ready()) return UNINITIALIZED;
    references--;
    note("shutdown");
    return OK;
}

const char *nvmlErrorString(int result) { return result == GPU_IS_LOST ? "GPU is lost" : "stub error"; }

int nvmlSystemGetDriverVersion(char *out, unsigned n) {
    if (!ready()) return UNINITIALIZED;
    snprintf(out, n, "%s", is("gb10") ? "580.173.02" : is("orin") ? "540.4.0" : "590.48.01");
    return OK;
}

int nvmlDeviceGetCount_v2(unsigned *n) {
    if (!ready()) return UNINITIALIZED;
    if (is("empty")) *n = 0;
    else if (is("gb10") || is("orin") || is("mig") || is("ok1") || is("only_b")) *n = 1;
    else *n = is("count_shrinks") && counted++ ? 1 : 2;
    return OK;
}

static int handle_of(card *c, void **out) {
    *out = NULL;
    if (code("all")) return code("all");
    if (c == &cards[B] && is("lost1")) return GPU_IS_LOST;
    *out = c;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **out) {
    if (!ready()) return UNINITIALIZED;
    if (i > 1) { *out = NULL; return INVALID_ARGUMENT; }
    if (is("gb10")) return handle_of(&cards[GB10], out);
    if (is("orin")) return handle_of(&cards[ORIN], out);
    if (is("only_b")) return handle_of(&cards[B], out);
    if (is("swapped")) i = 1 - i;
    return handle_of(&cards[i], out);
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **out) {
    *out = NULL;
    if (!ready()) return UNINITIALIZED;
    for (int i = A; i <= ORIN; i++) {
        const char *pci = cards[i].pci;
        if (*pci && (strcasecmp(pci, id) == 0 || strcasecmp(pci + 4, id) == 0)) {
            if ((i == GB10) != is("gb10")) continue;
            if ((is("ok1") && i == B) || (is("only_b") && i == A) || is("empty")) continue;
            return handle_of(&cards[i], out);
        }
    }
    return NOT_FOUND;
}

/* Every field goes through here. A null handle is a bug of the caller, and as fatal as in the real library. */
static int field(card *c) {
    if (!c) abort();
    if (!ready()) return UNINITIALIZED;
    return c == &cards[B] && is("fallen1") ? GPU_IS_LOST : OK;
}
#define FIELD(c) do { int bad = field(c); if (bad) return bad; } while (0)
#define HAS(value) do { if (!(value)) return NOT_SUPPORTED; } while (0)

int nvmlDeviceGetName(card *c, char *out, unsigned n) { FIELD(c); snprintf(out, n, "%s", c->name); return OK; }
int nvmlDeviceGetUUID(card *c, char *out, unsigned n) { FIELD(c); snprintf(out, n, "%s", c->uuid); return OK; }

int nvmlDeviceGetPciInfo_v3(card *c, pci_info *out) {
    FIELD(c);
    HAS(*c->pci);
    memset(out, 0, sizeof *out);
    snprintf(out->bus_id, sizeof out->bus_id, "%s", c->pci);
    snprintf(out->legacy, sizeof out->legacy, "%s", c->pci + 4);
    sscanf(c->pci, "%x:%x:%x", &out->domain, &out->bus, &out->device);
    return OK;
}

int nvmlDeviceGetMemoryInfo(card *c, memory_v1 *m) {
    FIELD(c);
    HAS(c->total_mib);
    m->total = c->total_mib * MIB;
    m->used = (c->used_mib + c->reserved_mib) * MIB; /* version 1 counts the driver's own part as used */
    m->free = m->total - m->used;
    if (is("sentinel")) m->total = m->free = m->used = ~0ULL;
    return OK;
}
int nvmlDeviceGetMemoryInfo_v2(card *c, memory_v2 *m) {
    FIELD(c);
    if (is("nov2")) return FUNCTION_NOT_FOUND;
    HAS(c->total_mib);
    m->total = c->total_mib * MIB;
    m->reserved = c->reserved_mib * MIB;
    m->used = c->used_mib * MIB;
    m->free = m->total - m->used - m->reserved;
    if (is("sentinel")) m->total = m->free = m->used = m->reserved = ~0ULL;
    return OK;
}

int nvmlDeviceGetCudaComputeCapability(card *c, int *major, int *minor) {
    FIELD(c);
    *major = (int)c->major;
    *minor = (int)c->minor;
    return OK;
}

static int number(card *c, unsigned value, unsigned absurd, unsigned *out) {
    FIELD(c);
    HAS(value);
    *out = is("sentinel") ? ~0U : is("absurd") ? absurd : value;
    return OK;
}
int nvmlDeviceGetNumGpuCores(card *c, unsigned *out) { return number(c, c ? c->cores : 0, 0, out); }
int nvmlDeviceGetMemoryBusWidth(card *c, unsigned *out) { return number(c, c ? c->bus_bits : 0, 0, out); }
int nvmlDeviceGetPowerUsage(card *c, unsigned *out) { return number(c, c ? c->milliwatt : 0, 4294967294U, out); }
int nvmlDeviceGetTemperature(card *c, int sensor, unsigned *out) {
    if (sensor != 0) return INVALID_ARGUMENT;
    if (is("hang_field")) for (;;) pause();
    if (is("noperm_field")) return NO_PERMISSION;
    return number(c, c ? c->celsius : 0, 65535, out);
}
int nvmlDeviceGetClockInfo(card *c, int kind, unsigned *out) {
    return kind == 1 ? number(c, c ? c->sm_mhz : 0, 4000000000U, out) : INVALID_ARGUMENT;
}
int nvmlDeviceGetMaxClockInfo(card *c, int kind, unsigned *out) {
    return number(c, !c ? 0 : kind == 2 ? c->memory_mhz : c->max_sm_mhz, 0, out);
}

int nvmlDeviceGetUtilizationRates(card *c, utilization *out) {
    FIELD(c);
    if (is("util999")) return 999;
    if (is("mig") || c == &cards[ORIN]) return NOT_SUPPORTED;
    out->gpu = is("absurd") ? 2147483632U : is("sentinel") ? ~0U : c->gpu_percent;
    out->memory = 0;
    return OK;
}

int nvmlDeviceGetRemappedRows(card *c, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    FIELD(c);
    HAS(c->bus_bits);
    *corrected = 0;
    *uncorrected = *pending = c == &cards[B] && is("remap1");
    *failed = 0;
    return OK;
}

int nvmlDeviceGetMigMode(card *c, unsigned *current, unsigned *pending) {
    FIELD(c);
    HAS(c == &cards[A] || c == &cards[B]);
    *current = *pending = is("mig");
    return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(card *c, unsigned *out) { FIELD(c); *out = is("mig") ? 7 : 0; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(card *c, unsigned i, void **out) {
    *out = NULL;
    FIELD(c);
    if (!is("mig") || i > 1) return NOT_FOUND;
    *out = &cards[PARTITION0 + i];
    return OK;
}
int nvmlDeviceGetGpuInstanceId(card *c, unsigned *out) {
    FIELD(c);
    HAS(c->instance >= 0);
    *out = (unsigned)c->instance;
    return OK;
}
int nvmlDeviceGetComputeInstanceId(card *c, unsigned *out) { FIELD(c); HAS(c->instance >= 0); *out = 0; return OK; }
int nvmlDeviceGetAttributes_v2(card *c, attributes *out) {
    FIELD(c);
    HAS(c->instance >= 0);
    memset(out, 0, sizeof *out);
    out->multiprocessors = c == &cards[PARTITION0] ? 60 : 32;
    out->memory_mib = c->total_mib;
    return OK;
}

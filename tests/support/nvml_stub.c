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
 *   fieldsN      every field of every device fails with code N, as when a container has lost its devices
 *   lost1        handle of device 1 fails: 15  fallen1       device 1 has a handle, every field fails: 15
 *   remap1       device 1 waits for a reset to remap rows
 *   count_shrinks  the second count in a process, and every later one, is 1
 *   gb10         one GB10: no memory figures   orin          one Jetson: no figures at all
 *   mig          one H100 cut into two instances
 *   util999      utilisation fails with 999    noperm_field  temperature fails with 4
 *   nov2         no version 2 of memory info   absurd        values no card can have
 *   sentinel     "not available" marks in place of values
 *
 * Both H100 have their ECC counters at 0 and a full PCIe link, unless:
 *   ecc1         device 1 had an uncorrectable error   remapped1  device 1 had one, and its row is replaced
 *   hot1         device 1 is slowed down by its hardware, and at 91 degrees
 *   reset1       device 1 waits for a reset            capped1    device 1 is at its power limit
 *   oldthrottle  throttling by the name of before 535  noecc      a card without ECC
 *   procs        device 0 has two processes, one of unknown size;  procs2: by version 2 of the call alone
 *   xidN         the driver reports Xid N of device 1, once;  xidpartN: of a partition;  xidnullN: of no device
 *   xiddead      the driver ends the stream of events         noevents: there are none
 *
 * Between the two H100 there are 18 NVLinks into switches, and a NUMA node in common, unless:
 *   direct       4 of A's links lead to B, 2 to a third card; both are behind one PCIe switch
 *   wired        no NVLink; one PCIe host bridge
 *   oldlinks     as direct, by a driver that cannot be asked whether GPUs reach each other
 *   vmlinks      the links are up and do not tell what is at their ends, as in a virtual machine
 *   nolinks      a driver that knows nothing of links
 *   farlinks     a common ancestor that no version of NVML has
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
    if (code("fields")) return code("fields");
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
    return number(c, !c ? 0 : c == &cards[B] && is("hot1") ? 91 : c->celsius, 65535, out);
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
    *pending = c == &cards[B] && is("remap1");
    *uncorrected = *pending || (c == &cards[B] && is("remapped1"));
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

static int is_direct(void) { return is("direct") || is("oldlinks"); }

int nvmlDeviceGetP2PStatus(card *a, card *b, int capability, unsigned *status) {
    FIELD(a);
    FIELD(b);
    if (is("nolinks") || is("oldlinks")) return NOT_SUPPORTED;
    if (capability != 2) return INVALID_ARGUMENT;
    *status = is("wired") ? 5 : 0;
    return OK;
}
int nvmlDeviceGetTopologyCommonAncestor(card *a, card *b, unsigned *level) {
    FIELD(a);
    FIELD(b);
    if (is("nolinks")) return NOT_SUPPORTED;
    *level = is("farlinks") ? 77 : is_direct() ? 10 : is("wired") ? 30 : 40;
    return OK;
}
int nvmlDeviceGetNvLinkState(card *c, unsigned link, unsigned *up) {
    FIELD(c);
    if (is("nolinks") || is("wired") || link >= 18) return link >= 18 ? INVALID_ARGUMENT : NOT_SUPPORTED;
    *up = !is_direct() || link < 6;
    return OK;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(card *c, unsigned link, unsigned *kind) {
    FIELD(c);
    (void)link;
    *kind = is("vmlinks") ? 0xFF : is_direct() ? 0 : 2;
    return OK;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(card *c, unsigned link, pci_info *out) {
    FIELD(c);
    memset(out, 0, sizeof *out);
    snprintf(out->bus_id, sizeof out->bus_id, "%s", link >= 4 ? "00000000:00:0B.0" : cards[c == &cards[A] ? B : A].pci);
    return OK;
}

/* Device 1 in the scenario of that name. */
static int its(card *c, const char *name) { return c == &cards[B] && is(name); }

int nvmlDeviceGetEccMode(card *c, unsigned *current, unsigned *pending) {
    FIELD(c);
    HAS(c->bus_bits && !is("noecc"));
    *current = *pending = is("sentinel") ? ~0U : 1;
    return OK;
}
int nvmlDeviceGetTotalEccErrors(card *c, int kind, int counter, unsigned long long *out) {
    FIELD(c);
    HAS(c->bus_bits && !is("noecc"));
    if (is("sentinel")) *out = ~0ULL;
    else if (kind == 0) *out = counter ? 12 : 3;
    else *out = its(c, "ecc1") || its(c, "remapped1") || its(c, "remap1");
    return OK;
}

static int throttle(card *c, unsigned long long *out) {
    FIELD(c);
    HAS(c->bus_bits);
    *out = is("sentinel") ? ~0ULL : its(c, "hot1") ? 0x48 : its(c, "capped1") ? 0x04 : 0x01;
    return OK;
}
int nvmlDeviceGetCurrentClocksEventReasons(card *c, unsigned long long *out) {
    return is("oldthrottle") ? FUNCTION_NOT_FOUND : throttle(c, out);
}
int nvmlDeviceGetCurrentClocksThrottleReasons(card *c, unsigned long long *out) {
    return is("oldthrottle") ? throttle(c, out) : FUNCTION_NOT_FOUND;
}
int nvmlDeviceGetTemperatureThreshold(card *c, int kind, unsigned *out) {
    return kind == 1 ? number(c, c && c->bus_bits ? 87 : 0, 65535, out) : INVALID_ARGUMENT;
}

static int pcie(card *c, unsigned value, unsigned *out) { return number(c, c && c->bus_bits ? value : 0, 0, out); }
int nvmlDeviceGetCurrPcieLinkGeneration(card *c, unsigned *out) { return pcie(c, 1, out); }
int nvmlDeviceGetMaxPcieLinkGeneration(card *c, unsigned *out) { return pcie(c, 5, out); }
int nvmlDeviceGetCurrPcieLinkWidth(card *c, unsigned *out) { return pcie(c, 16, out); }
int nvmlDeviceGetMaxPcieLinkWidth(card *c, unsigned *out) { return pcie(c, 16, out); }

typedef struct {
    unsigned id, scope;
    long long timestamp, latency;
    int type, result;
    union { double d; unsigned u; unsigned long long ull; } value;
} field_value;
int nvmlDeviceGetFieldValues(card *c, int n, field_value *values) {
    FIELD(c);
    for (int i = 0; i < n; i++) {
        values[i].result = values[i].id == 230 && c->bus_bits ? OK : NOT_SUPPORTED;
        values[i].value.u = is("absurd") ? 99 : its(c, "reset1");
    }
    return OK;
}

typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process;
static int processes(card *c, unsigned *n, process *out) {
    FIELD(c);
    static const process both[] = {{645400, 1073741824ULL, ~0U, ~0U}, {645401, ~0ULL, ~0U, ~0U}};
    unsigned room = *n;
    *n = c == &cards[A] && (is("procs") || is("procs2")) ? 2 : 0;
    if (*n == 0) return OK;
    if (!out || room < *n) return 7; /* INSUFFICIENT_SIZE */
    memcpy(out, both, sizeof both);
    return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(card *c, unsigned *n, process *out) {
    return is("procs2") ? FUNCTION_NOT_FOUND : processes(c, n, out);
}
int nvmlDeviceGetComputeRunningProcesses_v2(card *c, unsigned *n, process *out) { return processes(c, n, out); }

typedef struct { void *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } event;
static int events; /* what nvmlEventSetCreate hands out; its value means nothing */
static char told[64];

int nvmlEventSetCreate(void **out) { *out = &events; told[0] = 0; note("listen"); return ready() ? OK : UNINITIALIZED; }
int nvmlEventSetFree(void *set) { (void)set; note("unlisten"); return OK; }
int nvmlDeviceGetSupportedEventTypes(card *c, unsigned long long *out) {
    FIELD(c);
    *out = is("noevents") ? 0 : 0x19f;
    return OK;
}
int nvmlDeviceRegisterEvents(card *c, unsigned long long types, void *set) {
    FIELD(c);
    return set == &events && types == 8 ? OK : INVALID_ARGUMENT;
}
int nvmlEventSetWait_v2(void *set, event *out, unsigned ms) {
    if (set != &events) return INVALID_ARGUMENT;
    if (is("xiddead")) return 999;
    int part = code("xidpart"), nobody = code("xidnull"), xid = part + nobody + code("xid");
    if (!xid || strcmp(told, scenario()) == 0) {
        if (!xid) told[0] = 0;
        usleep(ms < 20 ? ms * 1000 : 20000);
        return 10; /* TIMEOUT */
    }
    snprintf(told, sizeof told, "%s", scenario());
    out->device = nobody ? NULL : &cards[B];
    out->type = 8;
    out->data = (unsigned)xid;
    out->gpu_instance = part ? 2 : ~0U;
    out->compute_instance = part ? 0 : ~0U;
    return OK;
}

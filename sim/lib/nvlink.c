// NVLink ports, peer-to-peer access and the NVSwitch fabric.
#define _GNU_SOURCE
#include "sim.h"

#include <string.h>

// NVML's code of an NVLink version, by major version.
unsigned int nvlink_version_code(unsigned int major)
{
    static const unsigned int codes[] = {0, 1, 2, 4, 6, 7, 8};
    return major < sizeof(codes) / sizeof(codes[0]) ? codes[major] : 0;
}

static bool is_active(const struct port *p) { return p->type != NVML_NVLINK_DEVICE_TYPE_UNKNOWN; }

// Starts a call on a port. NOT_SUPPORTED on a GPU without NVLink, INVALID_ARGUMENT for a port out of range.
static nvmlReturn_t find_port(const struct call *c, unsigned int link, const struct port **port)
{
    REQUIRE(link < NVML_NVLINK_MAX_LINKS);
    unsigned int count = gpu_port_count(c->gpu);
    if (count == 0)
        return NVML_ERROR_NOT_SUPPORTED;
    REQUIRE(link < count);
    *port = &c->gpu->ports[link];
    return NVML_SUCCESS;
}

// The same for a call that needs an active port.
static nvmlReturn_t find_active(const struct call *c, unsigned int link, const struct port **port)
{
    TRY(find_port(c, link, port));
    return is_active(*port) ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, nvmlEnableState_t *state)
{
    const struct port *port;
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE(state != NULL);
    TRY(find_port(&c, link, &port));
    *state = gpu_link_up(c.gpu, link) ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkVersion(nvmlDevice_t device, unsigned int link, unsigned int *version)
{
    const struct port *port;
    ENTER_DEVICE(c, device, FEATURE);
    TRY(find_active(&c, link, &port));
    return put_uint(version, nvlink_version_code(port->version));
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkCapability(nvmlDevice_t device, unsigned int link,
                                                    nvmlNvLinkCapability_t capability, unsigned int *result)
{
    const struct port *port;
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE((unsigned int)capability < NVML_NVLINK_CAP_COUNT);
    TRY(find_port(&c, link, &port));
    switch (capability) {
    case NVML_NVLINK_CAP_P2P_SUPPORTED:
    case NVML_NVLINK_CAP_P2P_ATOMICS:
        return put_uint(result, is_active(port));
    case NVML_NVLINK_CAP_VALID:
        return put_uint(result, 1);
    default:
        return put_uint(result, 0);
    }
}

static nvmlReturn_t put_remote(const struct call *c, unsigned int link, nvmlPciInfo_t *pci, size_t size)
{
    const struct port *port;
    nvmlPciInfo_t whole;
    REQUIRE(pci != NULL);
    TRY(find_active(c, link, &port));
    memset(&whole, 0, sizeof(whole));
    whole.domain = port->domain;
    whole.bus = port->bus;
    whole.device = port->device;
    format_bus(whole.busIdLegacy, sizeof(whole.busIdLegacy), "legacy", port->domain, port->bus, port->device);
    format_bus(whole.busId, sizeof(whole.busId), "long", port->domain, port->bus, port->device);
    memcpy(pci, &whole, size);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_remote(&c, link, pci, offsetof(nvmlPciInfo_t, busId));
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_remote(&c, link, pci, sizeof(*pci));
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned int link,
                                                          nvmlIntNvLinkDeviceType_t *type)
{
    const struct port *port;
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE(type != NULL);
    TRY(find_active(&c, link, &port));
    *type = port->type;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t device, unsigned int link,
                                                      nvmlNvLinkErrorCounter_t counter, unsigned long long *value)
{
    const struct port *port;
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE(value != NULL && (unsigned int)counter < NVML_NVLINK_ERROR_COUNT);
    TRY(find_active(&c, link, &port));
    *value = 0;
    return NVML_SUCCESS;
}

// Whether NVLinks join two GPUs: a port of one leads to the other, or both are on switches.
static bool joined(const struct gpu *a, const struct gpu *b)
{
    bool a_switched = false, b_switched = false;
    for (unsigned int i = 0; i < NVML_NVLINK_MAX_LINKS; i++) {
        const struct port *p = &a->ports[i];
        if (p->type == NVML_NVLINK_DEVICE_TYPE_GPU && p->domain == b->domain && p->bus == b->bus &&
            p->device == b->device)
            return true;
        a_switched |= p->type == NVML_NVLINK_DEVICE_TYPE_SWITCH;
        b_switched |= b->ports[i].type == NVML_NVLINK_DEVICE_TYPE_SWITCH;
    }
    return a_switched && b_switched;
}

NVML_API nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t device1, nvmlDevice_t device2, nvmlGpuP2PCapsIndex_t index,
                                             nvmlGpuP2PStatus_t *status)
{
    ENTER_DEVICE(c, device1, WHOLE);
    unsigned int first = c.slot;
    TRY(call_device(&c, device2, WHOLE));
    REQUIRE(status != NULL && (unsigned int)index < NVML_P2P_CAPS_INDEX_UNKNOWN);
    const struct gpu *a = &c.world->gpus[first], *b = c.gpu;
    bool pcie = gpu_is_data_center(a) && gpu_is_data_center(b) &&
                c.world->topology[first][c.slot] < NVML_TOPOLOGY_SYSTEM;
    bool ok = index == NVML_P2P_CAPS_INDEX_PCI ? pcie : joined(a, b);
    if (index == NVML_P2P_CAPS_INDEX_READ || index == NVML_P2P_CAPS_INDEX_WRITE)
        ok = ok || pcie;
    *status = ok ? NVML_P2P_STATUS_OK
              : index == NVML_P2P_CAPS_INDEX_NVLINK || index == NVML_P2P_CAPS_INDEX_ATOMICS
                  ? NVML_P2P_STATUS_NOT_SUPPORTED
                  : NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED;
    return NVML_SUCCESS;
}

// A fabric of one machine: cluster and clique 0, as without a multi-node NVLink domain.
static nvmlGpuFabricInfo_v3_t fabric_of(const struct gpu *g)
{
    nvmlGpuFabricInfo_v3_t info;
    memset(&info, 0, sizeof(info));
    info.status = NVML_SUCCESS;
    info.state = NVML_GPU_FABRIC_STATE_NOT_SUPPORTED;
    if (gpu_on_fabric(g)) {
        info.status = (nvmlReturn_t)gpu_value(g, FABRIC_STATUS, NVML_SUCCESS);
        info.state = (nvmlGpuFabricState_t)gpu_value(g, FABRIC_STATE, NVML_GPU_FABRIC_STATE_COMPLETED);
        info.healthMask = (unsigned int)gpu_value(g, FABRIC_HEALTH_MASK, 2); // degraded bandwidth: false
        info.healthSummary = (unsigned char)gpu_value(g, FABRIC_HEALTH, NVML_GPU_FABRIC_HEALTH_SUMMARY_HEALTHY);
    }
    return info;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, nvmlGpuFabricInfo_t *info)
{
    ENTER_DEVICE(c, device, WHOLE);
    REQUIRE(info != NULL);
    nvmlGpuFabricInfo_v3_t from = fabric_of(c.gpu);
    memset(info, 0, sizeof(*info));
    info->status = from.status;
    info->state = from.state;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfoV_t *info)
{
    ENTER_DEVICE(c, device, WHOLE);
    REQUIRE(info != NULL);
    unsigned int version = info->version;
    nvmlGpuFabricInfo_v3_t from = fabric_of(c.gpu);
    from.version = version;
    if (version == nvmlGpuFabricInfo_v3) {
        *info = from;
        return NVML_SUCCESS;
    }
    TRY(check_version(version, nvmlGpuFabricInfo_v2));
    memcpy(info, &from, sizeof(nvmlGpuFabricInfo_v2_t)); // the second version is the third without its end
    return NVML_SUCCESS;
}

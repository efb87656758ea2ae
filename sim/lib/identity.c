// Identity of a device: names, UUIDs, numbers, PCI address, serial numbers, firmware.
#define _GNU_SOURCE
#include "sim.h"

#include <stdio.h>
#include <string.h>

NVML_API nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
    char text[2 * TEXT_MAX + 8];
    ENTER_DEVICE(c, device, EITHER);
    if (c.mig == NULL)
        return put_string(name, length, c.gpu->name);
    snprintf(text, sizeof(text), "%s MIG %s", c.gpu->name, c.mig->profile);
    return put_string(name, length, text);
}

NVML_API nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
    ENTER_DEVICE(c, device, EITHER);
    return put_string(uuid, length, c.mig != NULL ? c.mig->uuid : c.gpu->uuid);
}

NVML_API nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor)
{
    ENTER_DEVICE(c, device, WHOLE);
    return put_uint(minor, c.gpu->minor);
}

NVML_API nvmlReturn_t nvmlDeviceGetModuleId(nvmlDevice_t device, unsigned int *module)
{
    ENTER_DEVICE(c, device, WHOLE);
    if (gpu_port_count(c.gpu) == 0)
        return NVML_ERROR_NOT_SUPPORTED; // only SXM modules have a place on a baseboard
    return put_uint(module, c.slot + 1);
}

NVML_API nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned int length)
{
    ENTER_DEVICE(c, device, FEATURE);
    if (c.gpu->serial[0] == '\0')
        return NVML_ERROR_NOT_SUPPORTED;
    return put_string(serial, length, c.gpu->serial);
}

NVML_API nvmlReturn_t nvmlDeviceGetBoardPartNumber(nvmlDevice_t device, char *number, unsigned int length)
{
    ENTER_DEVICE(c, device, FEATURE);
    if (c.gpu->board[0] == '\0')
        return NVML_ERROR_NOT_SUPPORTED;
    return put_string(number, length, c.gpu->board);
}

// The board's number is its PCI bus, as in the real library.
NVML_API nvmlReturn_t nvmlDeviceGetBoardId(nvmlDevice_t device, unsigned int *id)
{
    ENTER_DEVICE(c, device, WHOLE);
    return put_uint(id, c.gpu->domain << 16 | c.gpu->bus << 8);
}

NVML_API nvmlReturn_t nvmlDeviceGetMultiGpuBoard(nvmlDevice_t device, unsigned int *multi)
{
    ENTER_DEVICE(c, device, WHOLE);
    for (unsigned int i = 0; i < MAX_GPUS; i++)
        if (i != c.slot && c.world->gpus[i].present && c.world->topology[c.slot][i] == NVML_TOPOLOGY_INTERNAL)
            return put_uint(multi, 1);
    return put_uint(multi, 0);
}

NVML_API nvmlReturn_t nvmlDeviceOnSameBoard(nvmlDevice_t device1, nvmlDevice_t device2, int *same)
{
    ENTER_DEVICE(c, device1, WHOLE);
    unsigned int first = c.slot;
    TRY(call_device(&c, device2, WHOLE));
    REQUIRE(same != NULL);
    *same = first != c.slot && c.world->topology[first][c.slot] == NVML_TOPOLOGY_INTERNAL;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetVbiosVersion(nvmlDevice_t device, char *version, unsigned int length)
{
    ENTER_DEVICE(c, device, FEATURE);
    if (c.gpu->vbios[0] == '\0')
        return NVML_ERROR_NOT_SUPPORTED;
    return put_string(version, length, c.gpu->vbios);
}

NVML_API nvmlReturn_t nvmlDeviceGetInforomImageVersion(nvmlDevice_t device, char *version, unsigned int length)
{
    ENTER_DEVICE(c, device, FEATURE);
    if (!gpu_is_data_center(c.gpu))
        return NVML_ERROR_NOT_SUPPORTED;
    char text[32];
    snprintf(text, sizeof(text), "G%03u.0200.00.05", 400 + c.gpu->arch * 10);
    return put_string(version, length, text);
}

NVML_API nvmlReturn_t nvmlDeviceGetInforomVersion(nvmlDevice_t device, nvmlInforomObject_t object, char *version,
                                                  unsigned int length)
{
    static const char *const versions[] = {"2.1", "7.16", "2.0"};
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE((unsigned int)object < NVML_INFOROM_COUNT);
    if (!gpu_is_data_center(c.gpu) || (size_t)object >= sizeof(versions) / sizeof(versions[0]))
        return NVML_ERROR_NOT_SUPPORTED;
    return put_string(version, length, versions[object]);
}

NVML_API nvmlReturn_t nvmlDeviceValidateInforom(nvmlDevice_t device)
{
    ENTER_DEVICE(c, device, FEATURE);
    return gpu_is_data_center(c.gpu) ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

// The system processor of Turing and later runs firmware of the driver's version.
static bool has_gsp(const struct gpu *g) { return g->arch > NVML_DEVICE_ARCH_VOLTA; }

NVML_API nvmlReturn_t nvmlDeviceGetGspFirmwareVersion(nvmlDevice_t device, char *version)
{
    ENTER_DEVICE(c, device, FEATURE);
    if (!has_gsp(c.gpu))
        return NVML_ERROR_NOT_SUPPORTED;
    return put_string(version, NVML_GSP_FIRMWARE_VERSION_BUF_SIZE, c.world->machine.driver);
}

NVML_API nvmlReturn_t nvmlDeviceGetGspFirmwareMode(nvmlDevice_t device, unsigned int *enabled, unsigned int *by_default)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE(enabled != NULL && by_default != NULL);
    *enabled = *by_default = has_gsp(c.gpu);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t device, nvmlBrandType_t *brand)
{
    static const struct { const char *name; nvmlBrandType_t brand; } brands[] = {
        {"tesla", NVML_BRAND_TESLA}, {"quadro", NVML_BRAND_QUADRO}, {"nvidia", NVML_BRAND_NVIDIA},
        {"geforce", NVML_BRAND_GEFORCE}, {"geforce-rtx", NVML_BRAND_GEFORCE_RTX}, {"titan", NVML_BRAND_TITAN},
        {"nvidia-rtx", NVML_BRAND_NVIDIA_RTX}, {"rtx", NVML_BRAND_NVIDIA_RTX},
        {"quadro-rtx", NVML_BRAND_QUADRO_RTX}, {"titan-rtx", NVML_BRAND_TITAN_RTX},
    };
    unsigned int number;
    ENTER_DEVICE(c, device, EITHER);
    REQUIRE(brand != NULL);
    *brand = NVML_BRAND_UNKNOWN;
    for (size_t i = 0; i < sizeof(brands) / sizeof(brands[0]); i++)
        if (strcmp(brands[i].name, c.gpu->brand) == 0)
            *brand = brands[i].brand;
    if (sscanf(c.gpu->brand, "%2u", &number) == 1)
        *brand = (nvmlBrandType_t)number;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, nvmlDeviceArchitecture_t *arch)
{
    ENTER_DEVICE(c, device, EITHER);
    return put_uint(arch, c.gpu->arch);
}

NVML_API nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    ENTER_DEVICE(c, device, EITHER);
    REQUIRE(major != NULL && minor != NULL);
    *major = (int)c.gpu->cc_major;
    *minor = (int)c.gpu->cc_minor;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetBusType(nvmlDevice_t device, nvmlBusType_t *type)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_uint(type, NVML_BUS_TYPE_PCIE);
}

void format_bus(char *to, size_t size, const char *format, unsigned int domain, unsigned int bus, unsigned int device)
{
    if (strcmp(format, "legacy") == 0)
        snprintf(to, size, "%04X:%02X:%02X.0", domain & 0xffff, bus & 0xff, device & 0x1f);
    else
        snprintf(to, size, "%08X:%02X:%02X.0", domain, bus & 0xff, device & 0x1f);
}

static nvmlReturn_t put_pci(const struct call *c, nvmlPciInfo_t *pci)
{
    const struct gpu *g = c->gpu;
    REQUIRE(pci != NULL);
    memset(pci, 0, sizeof(*pci));
    pci->domain = g->domain;
    pci->bus = g->bus;
    pci->device = g->device;
    pci->pciDeviceId = g->pci_id;
    pci->pciSubSystemId = g->pci_subsystem;
    format_bus(pci->busIdLegacy, sizeof(pci->busIdLegacy), "legacy", g->domain, g->bus, g->device);
    format_bus(pci->busId, sizeof(pci->busId), "long", g->domain, g->bus, g->device);
    return NVML_SUCCESS;
}

// The first version's structure ends before the subsystem, which the second added.
NVML_API nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    nvmlPciInfo_t whole;
    ENTER_DEVICE(c, device, WHOLE);
    REQUIRE(pci != NULL);
    TRY(put_pci(&c, &whole));
    memcpy(pci, &whole, offsetof(nvmlPciInfo_t, pciSubSystemId));
    return NVML_SUCCESS;
}

// The second version has four unused words in place of the long bus id.
NVML_API nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    nvmlPciInfo_t whole;
    ENTER_DEVICE(c, device, WHOLE);
    REQUIRE(pci != NULL);
    TRY(put_pci(&c, &whole));
    memcpy(pci, &whole, offsetof(nvmlPciInfo_t, busId));
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    ENTER_DEVICE(c, device, WHOLE);
    return put_pci(&c, pci);
}

NVML_API nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t device, nvmlPciInfoExt_t *pci)
{
    ENTER_DEVICE(c, device, WHOLE);
    REQUIRE(pci != NULL);
    TRY(check_version(pci->version, nvmlPciInfoExt_v1));
    memset(pci, 0, sizeof(*pci));
    pci->version = nvmlPciInfoExt_v1;
    pci->domain = c.gpu->domain;
    pci->bus = c.gpu->bus;
    pci->device = c.gpu->device;
    pci->pciDeviceId = c.gpu->pci_id;
    pci->pciSubSystemId = c.gpu->pci_subsystem;
    pci->baseClass = 0x03;
    pci->subClass = gpu_is_data_center(c.gpu) ? 0x02 : 0x00; // 3D controller; VGA controller
    format_bus(pci->busId, sizeof(pci->busId), "long", c.gpu->domain, c.gpu->bus, c.gpu->device);
    return NVML_SUCCESS;
}

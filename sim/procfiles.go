package sim

import (
	"fmt"
	"strings"
)

// procFiles plans the driver's files in /proc and /sys/module.
func procFiles(m *Machine, driver, arch string) plan {
	p := plan{}
	p.addKernelVersion(driver, arch)
	p.file("proc/driver/nvidia/params", moduleParams)
	p.file("proc/driver/nvidia/registry", "Binary: \"\"\n")
	p.file("proc/driver/nvidia-caps/mig-minors", migMinors())
	p.file("proc/devices", procDevices(m))
	p.file("proc/stat", procStat(m))
	p.file("proc/meminfo", fmt.Sprintf("MemTotal:       %d kB\n", memoryKiB))
	p.capability("mig/config", capConfig, 0o400)
	p.capability("mig/monitor", capMonitor, 0o444)
	for i := range m.GPUs {
		g := &m.GPUs[i]
		p.file("proc/driver/nvidia/gpus/"+g.Bus+"/information", information(g, i, driver))
	}
	for _, module := range []string{"nvidia_uvm", "nvidia_modeset", "nvidia_drm"} {
		p.file("sys/module/"+module+"/initstate", "live\n")
	}
	p.file("sys/module/nvidia_drm/parameters/modeset", "Y\n")
	p.file("sys/module/nvidia/initstate", "live\n")
	p.file("sys/module/firmware_class/parameters/path", "\n")
	return p
}

// memoryKiB is the memory of each machine in KiB: 2 TiB without what the kernel takes for itself.
const memoryKiB = 2113416000

// procStat has a line for each CPU of the machine.
func procStat(m *Machine) string {
	const times = " 0 0 0 0 0 0 0 0 0 0\n"
	var b strings.Builder
	b.WriteString("cpu " + times)
	for _, cpu := range cpusOf(m) {
		fmt.Fprintf(&b, "cpu%d%s", cpu, times)
	}
	return b.String()
}

// addKernelVersion plans the files with the version of the loaded kernel module.
func (p plan) addKernelVersion(version, arch string) {
	p.file("proc/driver/nvidia/version", fmt.Sprintf(
		"NVRM version: NVIDIA UNIX Open Kernel Module for %s  %s  Release Build  (gpu-sim@localhost)\n"+
			"GCC version:  gcc version 12.2.0 (Debian 12.2.0-14+deb12u1)\n", libArch(arch), version))
	p.file("sys/module/nvidia/version", version+"\n")
}

func information(g *GPU, i int, driver string) string {
	return fmt.Sprintf("Model: \t\t %s\nIRQ:   \t\t %d\nGPU UUID: \t %s\nVideo BIOS: \t %s\nBus Type: \t PCIe\n"+
		"DMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\nBus Location: \t %s\nDevice Minor: \t %d\n"+
		"GPU Firmware: \t %s\nGPU Excluded:\t No\n", g.Name, 100+i, g.UUID, g.VBIOS, g.Bus, g.Minor, driver)
}

func procDevices(m *Machine) string {
	var b strings.Builder
	b.WriteString("Character devices:\n  1 mem\n  5 /dev/tty\n 10 misc\n")
	fmt.Fprintf(&b, "%d nvidia\n%d nvidia-modeset\n%d nvidiactl\n", majorNVIDIA, majorNVIDIA, majorNVIDIA)
	fmt.Fprintf(&b, "%d drm\n", majorDRM)
	if hasNVSwitch(m) {
		fmt.Fprintf(&b, "%d nvidia-nvlink\n%d nvidia-nvswitch\n", majorNVLink, majorNVSwitch)
	}
	fmt.Fprintf(&b, "%d nvidia-caps-imex-channels\n%d nvidia-caps\n%d nvidia-uvm\n", majorIMEX, majorCaps, majorUVM)
	b.WriteString("\nBlock devices:\n259 blkext\n")
	return b.String()
}

// moduleParams are the parameters of the nvidia module with their defaults, as in driver 580.
const moduleParams = `ResmanDebugLevel: 4294967295
RmLogonRC: 1
ModifyDeviceFiles: 1
DeviceFileUID: 0
DeviceFileGID: 0
DeviceFileMode: 438
InitializeSystemMemoryAllocations: 1
UsePageAttributeTable: 4294967295
EnableMSI: 1
EnablePCIeGen3: 0
MemoryPoolSize: 0
KMallocHeapMaxSize: 0
VMallocHeapMaxSize: 0
IgnoreMMIOCheck: 0
EnableStreamMemOPs: 0
EnableUserNUMAManagement: 1
NvLinkDisable: 0
RmProfilingAdminOnly: 1
PreserveVideoMemoryAllocations: 0
EnableS0ixPowerManagement: 0
S0ixPowerManagementVideoMemoryThreshold: 256
DynamicPowerManagement: 3
DynamicPowerManagementVideoMemoryThreshold: 200
RegisterPCIDriver: 1
EnablePCIERelaxedOrderingMode: 0
EnableResizableBar: 0
EnableGpuFirmware: 18
EnableGpuFirmwareLogs: 2
RmNvlinkBandwidthLinkCount: 0
EnableDbgBreakpoint: 0
OpenRmEnableUnsupportedGpus: 1
DmaRemapPeerMmio: 1
ImexChannelCount: 2048
CreateImexChannel0: 0
GrdmaPciTopoCheckOverride: 0
CoherentGPUMemoryMode: ""
RegistryDwords: ""
RegistryDwordsPerDevice: ""
RmMsg: ""
GpuBlacklist: ""
TemporaryFilePath: ""
ExcludedGpus: ""
`

package sim

import (
	"encoding/json"
	"path"
	"strings"
)

// driverLibrary is a library of the driver: the file, its SONAME, and the symlinks beside it. VER in a name stands for
// the driver's version.
type driverLibrary struct {
	file, soname string
	links        []string // each points to the next, and the last one to the file
	only         func(*Machine) bool
}

// driverLibraries are the libraries that driver 580.126.09 installs on x86-64 without the 32-bit ones, as its
// installer's .manifest lists them; NSCQ and NVSDM come in packages of their own.
var driverLibraries = []driverLibrary{
	versioned("libcuda", "1"),
	numbered("libcudadebugger", "1"),
	versioned("libnvcuvid", "1"),
	numbered("libEGL_nvidia", "0"),
	numbered("libGLESv1_CM_nvidia", "1"),
	numbered("libGLESv2_nvidia", "2"),
	numbered("libGLX_nvidia", "0"),
	versioned("libnvidia-allocator", "1"),
	{file: "libnvidia-api.so.1", soname: "libnvidia-api.so.1"},
	versioned("libnvidia-cfg", "1"),
	external("libnvidia-egl-gbm", "1.1.3"),
	external("libnvidia-egl-wayland", "1.1.20"),
	external("libnvidia-egl-xcb", "1.0.5"),
	external("libnvidia-egl-xlib", "1.0.5"),
	internal("libnvidia-eglcore"),
	versioned("libnvidia-encode", "1"),
	versioned("libnvidia-fbc", "1"),
	internal("libnvidia-glcore"),
	internal("libnvidia-glsi"),
	internal("libnvidia-glvkspirv"),
	internal("libnvidia-gpucomp"),
	internal("libnvidia-gtk3"),
	numbered("libnvidia-ngx", "1"),
	versioned("libnvidia-nvvm", "4"),
	{file: "libnvidia-nvvm70.so.4", soname: "libnvidia-nvvm70.so.4"},
	numbered("libnvidia-opencl", "1"),
	versioned("libnvidia-opticalflow", "1"),
	internal("libnvidia-pkcs11"),
	internal("libnvidia-pkcs11-openssl3"),
	internal("libnvidia-present"),
	versioned("libnvidia-ptxjitcompiler", "1"),
	internal("libnvidia-rtcore"),
	internal("libnvidia-tls"),
	numbered("libnvidia-vksc-core", "1"),
	internal("libnvidia-wayland-client"),
	numbered("libnvoptix", "1"),
	{
		file: "vdpau/libvdpau_nvidia.so.VER", soname: "libvdpau_nvidia.so.1",
		links: []string{"vdpau/libvdpau_nvidia.so.1"},
	},
	{file: "nvidia/xorg/nvidia_drv.so", soname: "nvidia_drv.so"},
	{
		file: "nvidia/xorg/libglxserver_nvidia.so.VER", soname: "libglxserver_nvidia.so.VER",
		links: []string{"nvidia/xorg/libglxserver_nvidia.so"},
	},
	{
		file: "libnvidia-nscq.so.VER", soname: "libnvidia-nscq.so.2",
		links: []string{"libnvidia-nscq.so.2", "libnvidia-nscq.so.2.0"}, only: hasNVSwitch,
	},
	{
		file: "libnvsdm.so.VER", soname: "libnvsdm.so.1",
		links: []string{"libnvsdm.so", "libnvsdm.so.1"}, only: hasNVSwitch,
	},
}

// The libraries with code: the simulated NVML, and the library that NVIDIA's container toolkit calls first.
var (
	mlLibrary      = versioned("libnvidia-ml", "1")
	sandboxLibrary = numbered("libnvidia-sandboxutils", "1")
)

func hasNVSwitch(m *Machine) bool { return len(m.NVSwitches) > 0 }

// versioned returns a library that programs are linked with. It has a link by its SONAME and one for the linker.
func versioned(name, abi string) driverLibrary {
	l := numbered(name, abi)
	l.links = append([]string{name + ".so"}, l.links...)
	return l
}

// numbered returns a library that is loaded by its SONAME.
func numbered(name, abi string) driverLibrary {
	soname := name + ".so." + abi
	return driverLibrary{file: name + ".so.VER", soname: soname, links: []string{soname}}
}

// internal returns a library that only other libraries of the driver load. Its SONAME has the driver's version.
func internal(name string) driverLibrary {
	return driverLibrary{file: name + ".so.VER", soname: name + ".so.VER"}
}

// external returns a library with a version of its own.
func external(name, version string) driverLibrary {
	major, _, _ := strings.Cut(version, ".")
	soname := name + ".so." + major
	return driverLibrary{file: name + ".so." + version, soname: soname, links: []string{soname}}
}

// driverPrograms are the programs of the driver that do nothing in a simulated node. Names of scripts end in ".sh".
var driverPrograms = []string{
	"nvidia-bug-report.sh", "nvidia-debugdump", "nvidia-modprobe", "nvidia-ngx-updater", "nvidia-pcc",
	"nvidia-persistenced", "nvidia-powerd", "nvidia-settings", "nvidia-sleep.sh", "nvidia-xconfig",
}

// switchPrograms are the programs of the packages for machines with NVSwitches.
var switchPrograms = []string{"nv-fabricmanager", "nvidia-imex", "nvidia-imex-ctl", "nvswitch-audit"}

// install describes the installation of a driver.
type install struct {
	machine        *Machine
	driver         string
	libDir, binDir string            // relative to the root
	arch           string            // GOARCH
	built          map[string][]byte // compiled files by name
}

// driverFiles plans the files of the installation.
func (in *install) driverFiles() (plan, error) {
	p := plan{}
	for _, l := range driverLibraries {
		if l.only != nil && !l.only(in.machine) {
			continue
		}
		data, err := Library{SONAME: in.ver(l.soname), Arch: in.arch}.ELF()
		if err != nil {
			return nil, err
		}
		in.addLibrary(p, l, data)
	}
	in.addLibrary(p, mlLibrary, in.built[builtLibrary])
	in.addLibrary(p, sandboxLibrary, in.built[builtSandbox])
	p.link(path.Join(in.libDir, "gbm/nvidia-drm_gbm.so"), "../libnvidia-allocator.so.1")
	if err := in.addPrograms(p); err != nil {
		return nil, err
	}
	in.addConfiguration(p)
	for _, name := range firmwareNames(in.driver) {
		p.file("usr/lib/firmware/nvidia/"+in.driver+"/"+name, "simulated firmware "+name+"\n")
	}
	p.socket("run/nvidia-persistenced/socket")
	if hasNVSwitch(in.machine) {
		p.socket("run/nvidia-fabricmanager/socket")
	}
	return p, nil
}

// firmwareNames returns the files in a driver's firmware directory. Driver 615 is the first with separate microcode
// files.
func firmwareNames(driver string) []string {
	names := []string{"gsp_ga10x.bin", "gsp_tu10x.bin"}
	if _, branch := cudaVersion(driver); branch >= 615 {
		names = append(names, "ucodes_ga10x.bin", "ucodes_tu10x.bin")
	}
	return names
}

func (in *install) ver(s string) string { return strings.ReplaceAll(s, "VER", in.driver) }

func (in *install) addLibrary(p plan, l driverLibrary, data []byte) {
	p.program(path.Join(in.libDir, in.ver(l.file)), data)
	for i, link := range l.links {
		next := l.file
		if i+1 < len(l.links) {
			next = l.links[i+1]
		}
		p.link(path.Join(in.libDir, link), path.Base(in.ver(next)))
	}
}

func (in *install) addPrograms(p plan) error {
	ends, err := exitProgram(in.arch)
	if err != nil {
		return err
	}
	names := driverPrograms
	if hasNVSwitch(in.machine) {
		names = append(append([]string{}, names...), switchPrograms...)
	}
	for _, name := range names {
		data := ends
		if strings.HasSuffix(name, ".sh") {
			data = []byte("#!/bin/sh\nexit 0\n")
		}
		p.program(path.Join(in.binDir, name), data)
	}
	for _, name := range []string{builtSMI, builtMPSControl, builtMPSServer} {
		p.program(path.Join(in.binDir, name), in.built[name])
	}
	return nil
}

// addConfiguration plans the files in which the loaders of EGL, Vulkan, OpenCL and X find the driver.
func (in *install) addConfiguration(p plan) {
	platform := func(file, library string) {
		p.file("usr/share/egl/egl_external_platform.d/"+file, icd("1.0.0", library, ""))
	}
	p.file("usr/share/glvnd/egl_vendor.d/10_nvidia.json", icd("1.0.0", "libEGL_nvidia.so.0", ""))
	platform("10_nvidia_wayland.json", "libnvidia-egl-wayland.so.1")
	platform("15_nvidia_gbm.json", "libnvidia-egl-gbm.so.1")
	platform("20_nvidia_xcb.json", "libnvidia-egl-xcb.so.1")
	platform("20_nvidia_xlib.json", "libnvidia-egl-xlib.so.1")
	p.file("etc/vulkan/icd.d/nvidia_icd.json", icd("1.0.1", "libGLX_nvidia.so.0", "1.4.312"))
	p.file("etc/vulkan/implicit_layer.d/nvidia_layers.json", layers())
	p.file("usr/share/vulkansc/icd.d/nvidia_icd_vksc.json", icd("1.0.1", "libnvidia-vksc-core.so.1", "1.0.14"))
	p.file("etc/OpenCL/vendors/nvidia.icd", "libnvidia-opencl.so.1\n")
	p.file("usr/share/nvidia/nvoptix.bin", "simulated OptiX data\n")
	p.file("usr/share/nvidia/nvidia-application-profiles-"+in.driver+"-rc", "{ \"rules\": [], \"profiles\": [] }\n")
	p.file("usr/share/nvidia/nvidia-application-profiles-"+in.driver+"-key-documentation", "{}\n")
	p.file("usr/share/X11/xorg.conf.d/10-nvidia.conf", in.xorgConfig("nvidia"))
	p.file("usr/share/X11/xorg.conf.d/nvidia-drm-outputclass.conf", in.xorgConfig("nvidia-drm"))
}

// icd returns the JSON file in which a loader finds a library. Vulkan's files have an API version.
func icd(format, library, api string) string {
	inner := map[string]string{"library_path": library}
	if api != "" {
		inner["api_version"] = api
	}
	return jsonText(map[string]any{"file_format_version": format, "ICD": inner})
}

func layers() string {
	return jsonText(map[string]any{
		"file_format_version": "1.0.0",
		"layers": []map[string]any{{
			"name": "VK_LAYER_NV_optimus", "type": "INSTANCE", "library_path": "libGLX_nvidia.so.0",
			"api_version": "1.4.312", "implementation_version": "1", "description": "NVIDIA Optimus layer",
		}},
	})
}

// jsonText encodes a value. It cannot fail, since the values contain only strings.
func jsonText(v any) string {
	data, _ := json.MarshalIndent(v, "", "    ")
	return string(data) + "\n"
}

func (in *install) xorgConfig(identifier string) string {
	return "Section \"OutputClass\"\n" +
		"    Identifier \"" + identifier + "\"\n" +
		"    MatchDriver \"nvidia-drm\"\n" +
		"    Driver \"nvidia\"\n" +
		"    ModulePath \"/" + path.Join(in.libDir, "nvidia/xorg") + "\"\n" +
		"EndSection\n"
}

package driver

import "io/fs"

// This file is the table of the files that make a driver: where they are, and which capabilities they serve. Its
// sources are the README of NVIDIA's Linux driver (chapter "Installed Components"), the packages of driver 580, and
// for the capabilities the documentation of NVIDIA_DRIVER_CAPABILITIES;
// https://download.nvidia.com/XFree86/Linux-x86_64/.

// vendorNVIDIA is the PCI vendor ID in the form of sysfs.
const vendorNVIDIA = "0x10de"

// UsesCUDA are the capabilities whose libraries load libcuda and need unified memory.
const UsesCUDA = Compute | Graphics | Video | NGX

// libraryRow is a library of the driver. Its file is NAME.so.DRIVERVERSION, or NAME.so.ANY.VERSION with ownVersion.
type libraryRow struct {
	name         string
	capabilities Capabilities
	ownVersion   bool
	// links are symlinks that a container needs besides the SONAME and those that the host has. In their targets
	// {file} is the library's file name and {soname} its SONAME.
	links []Link
}

// coreLibraries are the libraries of which one must be usable. See Driver.Check.
var coreLibraries = []string{"libcuda", "libnvidia-ml"}

var libraryTable = []libraryRow{
	// Many programs load libcuda.so, which a host has only with a development package.
	{name: "libcuda", capabilities: UsesCUDA, links: []Link{{"libcuda.so", "{soname}"}}},
	{name: "libnvidia-ml", capabilities: Utility},
	{name: "libcudadebugger", capabilities: Compute},
	{name: "libnvidia-ptxjitcompiler", capabilities: UsesCUDA},
	{name: "libnvidia-nvvm", capabilities: UsesCUDA},
	{name: "libnvidia-nvvm70", capabilities: UsesCUDA, ownVersion: true},
	{name: "libnvidia-gpucomp", capabilities: UsesCUDA},
	{name: "libnvidia-tileiras", capabilities: Compute},
	{name: "libnvidia-opencl", capabilities: Compute},
	{name: "libnvidia-pkcs11", capabilities: Compute},
	{name: "libnvidia-pkcs11-openssl3", capabilities: Compute},
	// libgbm loads its back end by the name of the kernel's driver.
	{
		name: "libnvidia-allocator", capabilities: Compute | Graphics | Video | Display,
		links: []Link{{"gbm/nvidia-drm_gbm.so", "../{soname}"}},
	},
	{name: "libnvidia-cfg", capabilities: Utility | Display},
	{name: "libnvidia-sandboxutils", capabilities: Utility},
	{name: "libnvidia-nscq", capabilities: Utility},
	{name: "libnvsdm", capabilities: Utility},

	{name: "libnvcuvid", capabilities: Video},
	{name: "libnvidia-encode", capabilities: Video},
	{
		name: "libnvidia-opticalflow", capabilities: Video | Graphics,
		links: []Link{{"libnvidia-opticalflow.so", "{soname}"}},
	},
	{name: "libvdpau_nvidia", capabilities: Video},

	// GLVND loads libGLX_indirect if it does not know the vendor.
	{name: "libGLX_nvidia", capabilities: Graphics | Display, links: []Link{{"libGLX_indirect.so.0", "{file}"}}},
	{name: "libEGL_nvidia", capabilities: Graphics | Display},
	{name: "libGLESv1_CM_nvidia", capabilities: Graphics | Display},
	{name: "libGLESv2_nvidia", capabilities: Graphics | Display},
	{name: "libnvidia-eglcore", capabilities: Graphics | Display},
	{name: "libnvidia-glcore", capabilities: Graphics | Display},
	{name: "libnvidia-glsi", capabilities: Graphics | Display},
	{name: "libnvidia-tls", capabilities: Graphics | Display},
	{name: "libnvidia-glvkspirv", capabilities: Graphics},
	{name: "libnvidia-rtcore", capabilities: Graphics},
	{name: "libnvidia-vksc-core", capabilities: Graphics},
	{
		name: "libnvidia-vulkan-producer", capabilities: Graphics,
		links: []Link{{"libnvidia-vulkan-producer.so", "{file}"}},
	},
	{name: "libnvidia-wayland-client", capabilities: Graphics | Display},
	{name: "libnvidia-present", capabilities: Graphics},
	{name: "libnvidia-fbc", capabilities: Graphics | Display},
	{name: "libnvoptix", capabilities: Graphics},
	{name: "libnvidia-egl-gbm", capabilities: Graphics | Display, ownVersion: true},
	{name: "libnvidia-egl-wayland", capabilities: Graphics | Display, ownVersion: true},
	{name: "libnvidia-egl-wayland2", capabilities: Graphics | Display, ownVersion: true},
	{name: "libnvidia-egl-xcb", capabilities: Graphics | Display, ownVersion: true},
	{name: "libnvidia-egl-xlib", capabilities: Graphics | Display, ownVersion: true},
	{name: "libnvidia-ngx", capabilities: NGX | Graphics},
}

// unlisted are the capabilities of a library that has the driver's version but is not in the table, for example one of
// a later driver. Since its purpose is unknown, containers get it with any capability.
const unlisted = All

// librarySubdirs are subdirectories of library directories.
var librarySubdirs = []string{"vdpau"}

// xorgModule is a module of the X server, with a link to it. The X server loads it by path, so it is not in the
// loader's cache. {version} is the driver's version. dir is the X server's directory for a module of privateModules.
type xorgModule struct{ file, link, dir string }

var xorgModules = []xorgModule{
	{"nvidia_drv.so", "", "/usr/lib/xorg/modules/drivers"},
	{"libglxserver_nvidia.so.{version}", "libglxserver_nvidia.so", "/usr/lib/xorg/modules/extensions"},
}

// privateModules is where Debian has the modules. The X server's own directories have links to them, by the names
// without a version, if Debian's alternatives choose this driver for the X server.
const privateModules = "/usr/lib/nvidia/current"

// xorgDirs are the directories of the X server's modules, relative to a directory with libraries.
var xorgDirs = []string{
	"nvidia/xorg",
	"xorg/modules/drivers",
	"xorg/modules/extensions",
	"xorg/modules/updates/drivers",
	"xorg/modules/updates/extensions",
}

// fileRow is a file of the driver that is not a library. The first of the directories that has such a file counts. The
// file is mounted at the path where it was found, or in the target directory if there is one: there the container's
// programs search for it. For example, a host's store of programs is not in the PATH of an image.
type fileRow struct {
	name         string
	kind         Kind
	capabilities Capabilities
	dirs         []string
	target       string
}

var (
	programDirs = []string{
		"/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin",
		"/usr/local/nvidia/bin", "/opt/nvidia/bin", "/run/current-system/sw/bin",
	}
	configDirs = []string{"/etc", "/usr/local/share", "/usr/share", "/run/opengl-driver/share"}
	// vulkanDirs includes "/": installations for container hosts have the files in /vulkan.
	vulkanDirs = append(append([]string{}, configDirs...), "/", "/usr/local/nvidia")
	socketDirs = []string{"/run", "/var/run"}
	// firmwareDirs are the directories that the kernel searches, in this order, after the one in its parameter.
	firmwareDirs = []string{
		"/lib/firmware/updates/{release}", "/lib/firmware/updates", "/lib/firmware/{release}", "/lib/firmware",
	}
)

var fileTable = []fileRow{
	{"nvidia-smi", KindBinary, Utility, programDirs, "/usr/bin"},
	{"nvidia-debugdump", KindBinary, Utility, programDirs, "/usr/bin"},
	{"nvidia-persistenced", KindBinary, Utility, programDirs, "/usr/bin"},
	{"nvidia-cuda-mps-control", KindBinary, Compute, programDirs, "/usr/bin"},
	{"nvidia-cuda-mps-server", KindBinary, Compute, programDirs, "/usr/bin"},
	{"nvidia-imex", KindBinary, Compute, programDirs, "/usr/bin"},
	{"nvidia-imex-ctl", KindBinary, Compute, programDirs, "/usr/bin"},
	{"nvidia-xconfig", KindBinary, Display, programDirs, "/usr/bin"},

	{"OpenCL/vendors/nvidia.icd", KindConfig, Compute, configDirs, "/etc"},
	{"glvnd/egl_vendor.d/10_nvidia.json", KindConfig, Graphics | Display, configDirs, "/usr/share"},
	{"egl/egl_external_platform.d/15_nvidia_gbm.json", KindConfig, Graphics | Display, configDirs, "/usr/share"},
	{"egl/egl_external_platform.d/10_nvidia_wayland.json", KindConfig, Graphics | Display, configDirs, "/usr/share"},
	{"egl/egl_external_platform.d/09_nvidia_wayland2.json", KindConfig, Graphics | Display, configDirs, "/usr/share"},
	{"egl/egl_external_platform.d/20_nvidia_xcb.json", KindConfig, Graphics | Display, configDirs, "/usr/share"},
	{"egl/egl_external_platform.d/20_nvidia_xlib.json", KindConfig, Graphics | Display, configDirs, "/usr/share"},
	{"nvidia/nvoptix.bin", KindConfig, Graphics, configDirs, "/usr/share"},
	{"vulkan/icd.d/nvidia_icd.json", KindConfig, Graphics, vulkanDirs, "/etc"},
	{"vulkan/icd.d/nvidia_icd.{machine}.json", KindConfig, Graphics, vulkanDirs, "/etc"},
	{"vulkan/icd.d/nvidia_layers.json", KindConfig, Graphics, vulkanDirs, "/etc"},
	{"vulkan/implicit_layer.d/nvidia_layers.json", KindConfig, Graphics, vulkanDirs, "/etc"},
	{"X11/xorg.conf.d/10-nvidia.conf", KindConfig, Display, configDirs, "/usr/share"},
	{"X11/xorg.conf.d/nvidia-drm-outputclass.conf", KindConfig, Display, configDirs, "/usr/share"},

	{"nvidia-persistenced/socket", KindSocket, Utility, socketDirs, "/run"},
	{"nvidia-fabricmanager/socket", KindSocket, Compute | Utility, socketDirs, "/run"},
	{mpsDir, KindSocket, Compute, []string{"/tmp"}, ""},
}

// dirSubdirs are the subdirectories that have files in a directory that has all files of a driver (host.DriverDirs).
var dirSubdirs = map[Kind][]string{
	KindBinary: {"bin", "sbin", ""}, KindConfig: {"share", "etc", ""}, KindSocket: {"run", ""},
	KindFirmware: {"lib/firmware", "firmware"},
}

// siblings maps a file to another one of the same package: an installation that has the second has the first too. Files
// that are not here have packages of their own, or belong to other GPUs.
var siblings = map[string]string{
	"libnvidia-ptxjitcompiler":          "libcuda",
	"nvidia-smi":                        "libnvidia-ml",
	"nvidia-cuda-mps-control":           "nvidia-cuda-mps-server",
	"nvidia-cuda-mps-server":            "nvidia-cuda-mps-control",
	"OpenCL/vendors/nvidia.icd":         "libnvidia-opencl",
	"glvnd/egl_vendor.d/10_nvidia.json": "libEGL_nvidia",
	"gsp*.bin":                          "libcuda",
}

// mpsDir is the directory with the sockets of CUDA's multi-process service.
const mpsDir = "nvidia-mps"

// firmwareNames are patterns of files in nvidia/VERSION of a firmware directory: for the GPU's system processor and,
// since driver 615, for its other processors.
var firmwareNames = []string{"gsp*.bin", "ucode*.bin"}

// controlNode is the name of the device node that every program opens which uses the driver.
const controlNode = "nvidiactl"

// controlNodes are the device nodes that belong to no GPU.
var controlNodes = []struct {
	name         string
	capabilities Capabilities
	needed       bool // CUDA does not start without it
}{
	{controlNode, All, false},
	{"nvidia-uvm", UsesCUDA, true},
	{"nvidia-uvm-tools", Compute, false},
	{"nvidia-modeset", Graphics | Display, false},
}

// UsesDRM are the capabilities that need a GPU's device nodes under /dev/dri.
const UsesDRM = Graphics | Video | Display

// imexChannel begins the names of the device nodes of IMEX channels; the number follows.
const imexChannel = "nvidia-caps-imex-channels/channel"

// extraRow is an extra of the table. The classes are those of NVIDIA's own specs.
type extraRow struct {
	extra Extra
	class string
	// nodes are names of device nodes under /dev, and numbered is the prefix of names that end with a number.
	nodes    []string
	numbered string
	files    []extraFileRow
}

// extraFileRow is a file or directory with the same path in the container.
type extraFileRow struct {
	path string
	mode fs.FileMode
}

// libcufile reads its settings from cufile.json, and from udev which disks the kernel module can read.
var extraTable = []extraRow{
	{extra: IMEX, class: "imex-channel", numbered: imexChannel},
	{
		extra: GDS, class: "gds", numbered: "nvidia-fs",
		files: []extraFileRow{{"/etc/cufile.json", 0}, {"/run/udev", fs.ModeDir}},
	},
	{extra: GDRCopy, class: "gdrcopy", nodes: []string{"gdrdrv"}},
	{extra: MOFED, class: "mofed", nodes: []string{"infiniband/rdma_cm"}, numbered: "infiniband/uverbs"},
	{extra: NVSwitch, class: "nvswitch", nodes: []string{"nvidia-nvswitchctl"}, numbered: "nvidia-nvswitch"},
}

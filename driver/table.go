package driver

import "io/fs"

// This file is what is NVIDIA's alone: which files make a driver, where they are, and what they serve. The sources are
// the README of NVIDIA's Linux driver (chapter "Installed Components"), the packages of driver 580, and for the
// capabilities the documentation of NVIDIA_DRIVER_CAPABILITIES; https://download.nvidia.com/XFree86/Linux-x86_64/.

// vendorNVIDIA is the PCI vendor.
const vendorNVIDIA = "0x10de"

// UsesCUDA are the capabilities whose libraries load libcuda and need unified memory.
const UsesCUDA = Compute | Graphics | Video | NGX

// libraryRow is a library of the driver. Its file is NAME.so.DRIVERVERSION, or with ownVersion NAME.so.ANY.VERSION.
type libraryRow struct {
	name         string
	capabilities Capabilities
	ownVersion   bool
	// links are symlinks beside the library, besides its SONAME and those of the host. In their targets {file} is the
	// library's file name and {soname} its SONAME.
	links []Link
}

// coreLibraries are those that a driver is no driver without: one of them must be usable. See Driver.Check.
var coreLibraries = []string{"libcuda", "libnvidia-ml"}

var libraryTable = []libraryRow{
	// Many programs open libcuda.so, which only a development package has on the host.
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
	// libgbm opens its back end by the name of the kernel's driver.
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

	// GLVND asks for libGLX_indirect when it cannot tell the vendor.
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

// unlisted are the capabilities of a library of the driver's version that the table does not know: a later driver's.
// It is given with all of them, since nobody can say what would break without it.
const unlisted = All

// librarySubdirs are below a library directory.
var librarySubdirs = []string{"vdpau"}

// xorgModules are modules of the X server. They are loaded by path, so they are not for the loader's cache. {version}
// is the driver's.
var xorgModules = []struct{ file, link string }{
	{"nvidia_drv.so", ""},
	{"libglxserver_nvidia.so.{version}", "libglxserver_nvidia.so"},
}

// xorgSubdirs are below a library directory, xorgDirs are not.
var (
	xorgSubdirs = []string{
		"nvidia/xorg",
		"xorg/modules/drivers",
		"xorg/modules/extensions",
		"xorg/modules/updates/drivers",
		"xorg/modules/updates/extensions",
	}
	xorgDirs = []string{
		"/usr/lib/xorg/modules/drivers",
		"/usr/lib/xorg/modules/extensions",
		"/usr/lib/xorg/modules/updates/drivers",
		"/usr/lib/xorg/modules/updates/extensions",
		"/usr/lib64/xorg/modules/drivers",
		"/usr/lib64/xorg/modules/extensions",
		"/usr/lib64/xorg/modules/updates/drivers",
		"/usr/lib64/xorg/modules/updates/extensions",
	}
)

// fileRow is a file of the driver that is not a library: NAME in the first of the directories that has it. It is
// mounted at the path where it was found, or with a target in that directory, where the container's libraries look.
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
	// vulkanDirs has the root, since installations for container hosts have a bare /vulkan.
	vulkanDirs = append(append([]string{}, configDirs...), "/", "/usr/local/nvidia")
	socketDirs = []string{"/run", "/var/run"}
	// firmwareDirs are where the kernel looks besides the directory that its parameter names, in its order.
	firmwareDirs = []string{
		"/lib/firmware/updates/{release}", "/lib/firmware/updates", "/lib/firmware/{release}", "/lib/firmware",
	}
)

var fileTable = []fileRow{
	{"nvidia-smi", KindBinary, Utility, programDirs, ""},
	{"nvidia-debugdump", KindBinary, Utility, programDirs, ""},
	{"nvidia-persistenced", KindBinary, Utility, programDirs, ""},
	{"nvidia-cuda-mps-control", KindBinary, Compute, programDirs, ""},
	{"nvidia-cuda-mps-server", KindBinary, Compute, programDirs, ""},
	{"nvidia-imex", KindBinary, Compute, programDirs, ""},
	{"nvidia-imex-ctl", KindBinary, Compute, programDirs, ""},
	{"nvidia-xconfig", KindBinary, Display, programDirs, ""},

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

	{"nvidia-persistenced/socket", KindSocket, Utility, socketDirs, ""},
	{"nvidia-fabricmanager/socket", KindSocket, Compute | Utility, socketDirs, ""},
	{mpsDir, KindSocket, Compute, []string{"/tmp"}, ""},
}

// mpsDir is the directory with the sockets of CUDA's multi-process service.
const mpsDir = "nvidia-mps"

// firmwareNames are patterns in nvidia/VERSION of a firmware directory: of the GPU's system processor, and since driver
// 615 of its other processors.
var firmwareNames = []string{"gsp*.bin", "ucode*.bin"}

// controlNodes are the nodes that belong to no GPU. Whatever uses the driver opens nvidiactl.
var controlNodes = []struct {
	name         string
	capabilities Capabilities
}{
	{"nvidiactl", All},
	{"nvidia-uvm", UsesCUDA},
	{"nvidia-uvm-tools", Compute},
	{"nvidia-modeset", Graphics | Display},
}

// UsesDRM are the capabilities that need a GPU's nodes under /dev/dri.
const UsesDRM = Graphics | Video | Display

// imexChannel begins the names of the nodes of IMEX channels; their number follows.
const imexChannel = "nvidia-caps-imex-channels/channel"

// extraRow is what there may be besides GPUs. The classes are those of NVIDIA's own specs.
type extraRow struct {
	extra Extra
	class string
	// nodes are names under /dev, and numbered is what such names begin with that end with a number.
	nodes    []string
	numbered string
	files    []extraFileRow
}

// extraFileRow is a file or directory of that path, in the container too.
type extraFileRow struct {
	path string
	mode fs.FileMode
}

// libcufile asks udev which disks the kernel's module can read from, and reads its settings.
var extraTable = []extraRow{
	{extra: IMEX, class: "imex-channel"},
	{
		extra: GDS, class: "gds", numbered: "nvidia-fs",
		files: []extraFileRow{{"/etc/cufile.json", 0}, {"/run/udev", fs.ModeDir}},
	},
	{extra: GDRCopy, class: "gdrcopy", nodes: []string{"gdrdrv"}},
	{extra: MOFED, class: "mofed", nodes: []string{"infiniband/rdma_cm"}, numbered: "infiniband/uverbs"},
	{extra: NVSwitch, class: "nvswitch", nodes: []string{"nvidia-nvswitchctl"}, numbered: "nvidia-nvswitch"},
}

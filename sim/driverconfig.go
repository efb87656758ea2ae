package sim

import (
	"encoding/json"
	"path"
)

// addConfiguration plans the files by which the loaders of EGL, Vulkan, OpenCL and X find the driver.
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

// icd is the JSON by which a loader finds a library. An API version makes it one of Vulkan's.
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

// jsonText cannot fail: what it is given has only strings in it.
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

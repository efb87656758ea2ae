package doctor

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/trust"
	"gpu-cdi-plugin/test/lib/testenv"
)

// ids returns a line for each finding.
func ids(list []Finding) []string {
	lines := []string{}
	for _, f := range list {
		lines = append(lines, string(f.Severity)+" "+f.ID)
	}
	return lines
}

func TestNothingIsWrongOnAGoodHost(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		host func(*testing.T) *testHost
		more func(*testHost)
	}{
		"a workstation with podman":                        {workstation, nil},
		"a node with containerd 2 and a kubelet that runs": {kubeNode, nil},
		"a node whose plugin runs": {kubeNode, func(h *testHost) {
			h.listen(h.options.PluginDir + "/gpu-cdi-nvidia-com-gpu.sock")
			h.kubelet.Pods.Allocatable = map[string][]string{"nvidia.com/gpu": {"GPU-a"}}
		}},
		"a machine with MIG devices": {func(t *testing.T) *testHost { t.Helper(); return newHost(t, "mig-h100") }, nil},
		"docker 28.2, which has CDI on, and a hook by which --gpus works": {workstation, func(h *testHost) {
			h.program("usr/bin/dockerd")
			h.program("usr/bin/nvidia-cdi-hook")
			h.packages("docker-ce", "5:28.2.2-1~debian.12~bookworm")
		}},
		"docker 27 with CDI turned on": {workstation, func(h *testHost) {
			h.program("usr/bin/dockerd")
			h.program("usr/bin/nvidia-cdi-hook")
			h.packages("docker-ce", "5:27.0.0-1")
			h.write("etc/docker/daemon.json", `{"features": {"cdi": true}, "default-runtime": "runc"}`)
		}},
		"containerd 1.7 with CDI turned on": {kubeNode, func(h *testHost) {
			h.packages("containerd.io", "1.7.27-1", "kubelet", "1.31.0-1.1")
			h.write("etc/containerd/config.toml", "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\nenable_cdi = true\n")
		}},
		"containerd 1.7 for docker, without CRI": {workstation, func(h *testHost) {
			h.program("usr/bin/containerd")
			h.program("usr/bin/crictl")
			h.packages("containerd.io", "1.7.27-1", "podman", "4.3.1")
			h.write("etc/containerd/config.toml", "disabled_plugins = [\"cri\"]\n")
		}},
		"CRI-O with its usual files": {workstation, func(h *testHost) {
			h.program("usr/bin/crio")
			h.write("etc/crio/crio.conf.d/10-crio.conf", "[crio.runtime]\ndefault_runtime = \"crun\"\n"+
				"[crio.runtime.runtimes.crun]\nruntime_path = \"/usr/bin/crun\"\n")
		}},
		"SELinux that lets containers use devices": {workstation, func(h *testHost) {
			h.write("sys/fs/selinux/enforce", "1")
			h.write("sys/fs/selinux/booleans/container_use_devices", "1 1")
		}},
		"SELinux that enforces, with engines that set no labels": {kubeNode, func(h *testHost) {
			h.write("sys/fs/selinux/enforce", "1")
			h.write("sys/fs/selinux/booleans/container_use_devices", "0 0")
		}},
		"NVIDIA's runtime as the default one, which ignores images": {workstation, func(h *testHost) {
			h.program("usr/bin/dockerd")
			h.program("usr/bin/nvidia-container-runtime")
			h.program("usr/bin/nvidia-container-runtime-hook")
			h.packages("docker-ce", "5:28.2.2-1")
			h.write("etc/docker/daemon.json", `{"default-runtime": "nvidia",
				"runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}}`)
			h.write("etc/nvidia-container-runtime/config.toml",
				"accept-nvidia-visible-devices-envvar-when-unprivileged = false\n")
		}},
		"a tree of files without processes": {workstation, func(h *testHost) {
			h.remove("proc/thread-self")
		}},
		"podman 4, which reads no cdi_spec_dirs": {workstation, func(h *testHost) {
			h.packages("podman", "4.9.3+ds1-1ubuntu0.2")
			h.write("etc/containers/containers.conf", "[engine]\ncdi_spec_dirs = []\n")
		}},
		"a spec of a version that the engine can just read": {workstation, func(h *testHost) {
			h.packages("podman", "4.9.3+ds1-1ubuntu0.2")
			h.remove("run/cdi/nvidia.com-gpu.json")
			h.foreignSpec("run/cdi/nvidia.yaml")
			h.specVersion("run/cdi/nvidia.yaml", "0.6.0")
		}},
		"podman that gives other devices to each container": {workstation, func(h *testHost) {
			h.write("etc/containers/containers.conf", "[containers]\ndevices = [\"/dev/fuse\"]\n")
		}},
		"services that run": {workstation, func(h *testHost) {
			h.install("gpu-cdi-watch.service", "gpu-cdi-plugin.service", "device-manager.socket")
			h.systemd(map[string][3]string{
				"gpu-cdi-watch.service": {"active", "running"}, "device-manager.socket": {"active", "listening"},
			})
		}},
		"device-manager in place of the service": {workstation, func(h *testHost) {
			h.install("gpu-cdi-watch.service", "device-manager.socket", "device-manager.service")
			h.systemd(map[string][3]string{"device-manager.service": {"active", "running"}})
		}},
		"configurations without a mistake": {workstation, func(h *testHost) {
			h.write("etc/gpu-cdi-plugin/config.yaml", "mig-strategy: mixed\n")
			h.write("etc/device-manager/config.yaml", "topology-policy: restricted\n")
		}},
		"a hook whose program exists": {workstation, func(h *testHost) {
			h.program("usr/libexec/other-hook")
			h.write("usr/share/containers/oci/hooks.d/10-other.json", hookDocumentOf("/usr/libexec/other-hook"))
		}},
		"a hook document of the old version": {workstation, func(h *testHost) {
			h.program("usr/libexec/other-hook")
			h.write("usr/share/containers/oci/hooks.d/10-other.json",
				`{"hook": "/usr/libexec/other-hook", "stages": ["prestart"], "cmds": [".*"]}`)
		}},
		"a fabric manager without a socket": {dgxNode, func(h *testHost) {
			h.remove("run/nvidia-fabricmanager")
			h.writeSpec()
			h.write("proc/55/comm", "nv-fabricmanage\n")
		}},
		"an older package beside a program that was built here": {kubeNode, func(h *testHost) {
			h.program("usr/local/bin/containerd")
			h.packages("containerd", "1.6.20", "kubelet", "1.36.3")
		}},
		"a spec on a tmpfs that a service makes again": {workstation, func(h *testHost) {
			h.mount("run/cdi", 0)
			h.writeSpec()
			h.write("run/systemd/system/x", "")
			h.enable("gpu-cdi-watch.service")
		}},
		"NVIDIA's service that is masked": {workstation, func(h *testHost) {
			h.refresh("usr/lib/systemd/system")
			h.write("usr/lib/udev/rules.d/99-nvidia-cdi-refresh.rules", "SYSTEMD_WANTS\n")
			h.link("etc/systemd/system/nvidia-cdi-refresh.service", os.DevNull)
			h.link("etc/systemd/system/nvidia-cdi-refresh.path", os.DevNull)
		}},
		"NVIDIA's service of an older toolkit that is disabled": {workstation, func(h *testHost) {
			h.refresh("etc/systemd/system")
		}},
		"NVIDIA's service whose rule is masked": {workstation, func(h *testHost) {
			h.refresh("usr/lib/systemd/system")
			h.write("usr/lib/udev/rules.d/99-nvidia-cdi-refresh.rules", "SYSTEMD_WANTS\n")
			h.link("etc/udev/rules.d/99-nvidia-cdi-refresh.rules", os.DevNull)
		}},
		"NVIDIA's toolkit, and nothing of ours": {workstation, func(h *testHost) {
			h.refresh("usr/lib/systemd/system")
			h.write("usr/lib/udev/rules.d/99-nvidia-cdi-refresh.rules", "SYSTEMD_WANTS\n")
			h.remove("run/cdi/nvidia.com-gpu.json")
			h.foreignSpec("run/cdi/nvidia.yaml")
		}},
		"a spec of another program that ours shadows": {workstation, func(h *testHost) {
			h.foreignSpec("etc/cdi/nvidia.json")
		}},
		"an old spec that ours shadows": {workstation, func(h *testHost) {
			h.write("etc/cdi/nvidia.json", `{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [
				{"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0", "hostPath": "/dev/nvidia99"}]}}]}`)
		}},
		"a spec that needs no hook, without the hook": {workstation, func(h *testHost) {
			h.options.Hook = ""
			h.writeSpec()
			h.remove("usr/libexec/prestart-hook")
		}},
		"a spec for nvidia-smi only": {workstation, func(h *testHost) {
			h.options.Capabilities = driver.Utility
			h.writeSpec()
		}},
		"a spec of another vendor whose files are gone": {workstation, func(h *testHost) {
			h.write("etc/cdi/intel.json", `{"cdiVersion": "0.5.0", "kind": "intel.com/gpu", "devices": [
				{"name": "x", "containerEdits": {"deviceNodes": [{"path": "/dev/dri/card9"}]}}]}`)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := c.host(t)
			if c.more != nil {
				c.more(h)
			}
			if list := h.examine(); len(list) > 0 {
				t.Errorf("got %+v", list)
			}
		})
	}
}

func hookDocumentOf(program string) string {
	return fmt.Sprintf(`{"version": "1.0.0", "hook": {"path": %q}, "when": {"always": true}, "stages": ["prestart"]}`,
		program)
}

// fault is one fault on a good host, and the findings about it.
type fault struct {
	host func(*testing.T) *testHost
	make func(*testHost)
	want string // IDs with their severities
	// says is a part of the problem or of the fix of the first finding.
	says string
	// advice says why the first finding's fix is no command that is run here, if that does not go for all of its ID.
	advice string
}

func TestEachFaultIsFound(t *testing.T) {
	t.Parallel()
	for name, c := range faults {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := c.host(t)
			c.make(h)
			list := h.examine()
			if diff := cmp.Diff(strings.Split(c.want, ", "), ids(list)); diff != "" {
				t.Fatalf("(-want +got):\n%s\n%+v", diff, list)
			}
			text := strings.ReplaceAll(list[0].Problem+"\n"+list[0].Fix, h.node.Root()+"/", "HOST/")
			if !strings.Contains(text, c.says) {
				t.Errorf("want %q in:\n%s", c.says, text)
			}
			for _, f := range list {
				if f.Subject == "" || f.Problem == "" || f.Why == "" || f.Fix == "" {
					t.Errorf("a part is empty: %+v", f)
				}
			}
			if c.advice == "" && !hasAdvice(list) && !t.Failed() {
				h.mend(list)
				if left := faultsOf(h.examine()); left != "" {
					t.Errorf("after the mends this is wrong:\n%s\nthe mends were:\n%s", left, faultsOf(list))
				}
			}
		})
	}
}

var faults = map[string]fault{
	"no driver": {workstation, func(h *testHost) {
		h.remove(h.node.LibDir(), "sys/module/nvidia", "proc/driver", "run/cdi/nvidia.com-gpu.json")
	}, "error driver-missing", "no libcuda or libnvidia-ml", ""},
	"no GPU on the bus either": {workstation, func(h *testHost) {
		h.remove(h.node.LibDir(), "sys/module/nvidia", "proc/driver", "sys/bus", "run/cdi/nvidia.com-gpu.json")
	}, "error gpu-none", "no NVIDIA GPU is on the PCI bus", ""},
	"a loaded module without libraries": {workstation, func(h *testHost) {
		h.remove(h.node.LibDir(), "run/cdi/nvidia.com-gpu.json")
	}, "error driver-missing", "580.126.09 is loaded", ""},
	"a driver that is not loaded": {workstation, func(h *testHost) {
		h.remove("sys/module/nvidia", "proc/driver")
	}, "error driver-not-loaded", "modprobe nvidia", ""},
	"nouveau in place of the driver": {workstation, func(h *testHost) {
		h.remove("sys/module/nvidia", "proc/driver")
		h.write("sys/module/nouveau/initstate", "live\n")
	}, "error driver-not-loaded", "nouveau is, which takes the GPUs", ""},
	"libraries of another version than the module": {workstation, func(h *testHost) {
		testenv.Must(h.t, h.node.SetKernelVersion("590.44.01"))
	}, "error driver-version", "the driver has version 590.44.01", ""},
	"an empty libcuda": {workstation, func(h *testHost) {
		h.write(h.node.LibDir()+"/libcuda.so.580.126.09", "")
		h.remove("run/cdi/nvidia.com-gpu.json")
	}, "error driver-damaged", "libcuda.so.580.126.09", ""},
	"no nvidia-smi beside libnvidia-ml": {workstation, func(h *testHost) {
		h.remove("usr/bin/nvidia-smi")
		h.writeSpec()
	}, "warning driver-files", "nvidia-smi", ""},
	"a driver that does not answer": {workstation, func(h *testHost) {
		h.options.Devices = func(context.Context) (*gpu.Snapshot, error) {
			return nil, fmt.Errorf("start: %w", gpu.ErrNotAnswering)
		}
		h.options.Advice = func(error) string { return "see dmesg" }
	}, "error driver-fails", "see dmesg", ""},
	"a driver without GPUs": {workstation, func(h *testHost) {
		h.options.Devices = func(context.Context) (*gpu.Snapshot, error) { return &gpu.Snapshot{}, nil }
		h.remove("run/cdi/nvidia.com-gpu.json", "proc/driver/nvidia/gpus")
	}, "error gpu-none", "has no GPU", ""},
	"a lost GPU": {dgxNode, func(h *testHost) {
		h.options.Devices = func(context.Context) (*gpu.Snapshot, error) {
			s, err := h.node.Snapshot()
			s.Devices[3].Error = "GPU is lost"
			return s, err
		}
	}, "error gpu-unreadable, error spec-stale", "nvidia-smi --gpu-reset", ""},
	"NVSwitches without a fabric manager": {dgxNode, func(h *testHost) {
		h.remove("run/nvidia-fabricmanager")
		h.writeSpec()
	}, "error fabricmanager-missing", "systemctl enable --now nvidia-fabricmanager", ""},
	"NVSwitches without a persistence daemon": {dgxNode, func(h *testHost) {
		h.remove("run/nvidia-persistenced")
		h.writeSpec()
	}, "note persistenced-missing", "nvidia-persistenced", ""},

	"a GPU without a kernel driver": {dgxNode, func(h *testHost) {
		h.unbind("")
	}, "warning gpu-unbound", "the GPU has no kernel driver", ""},
	"a GPU of a virtual machine": {dgxNode, func(h *testHost) {
		h.unbind("vfio-pci")
	}, "note gpu-unbound", "vfio-pci has the GPU", ""},
	"a GPU that another driver has": {dgxNode, func(h *testHost) {
		h.unbind("nouveau")
	}, "warning gpu-unbound", "the kernel driver nouveau has the GPU", ""},
	"a link to libcuda that leads nowhere": {workstation, func(h *testHost) {
		h.link(h.node.LibDir()+"/libcuda.so", "libcuda.so.570.1")
	}, "warning driver-link", "the link leads nowhere", ""},
	"device nodes that only root can open": {workstation, func(h *testHost) {
		testenv.Must(h.t, os.Chmod(h.at("dev/nvidia0"), 0o600))
	}, "warning node-private", "chmod a+rw HOST/dev/nvidia0", ""},
	"device nodes that the module makes for root only": {workstation, func(h *testHost) {
		for _, name := range []string{"dev/nvidia0", "dev/nvidiactl"} {
			testenv.Must(h.t, os.Chmod(h.at(name), 0o600))
		}
		h.write("proc/driver/nvidia/params", "ModifyDeviceFiles: 1\nDeviceFileMode: 384\n")
	}, "warning node-private, warning node-private", "NVreg_DeviceFileMode=0666", "it changes the host's kernel module"},
	"no nvidia-modprobe to make a device node": {workstation, func(h *testHost) {
		h.remove("dev/nvidia-uvm", "usr/bin/nvidia-modprobe")
		h.writeSpec()
	}, "error node-missing", "install the driver's nvidia-modprobe", "it installs a package"},

	"nvidia_uvm is not loaded, as after a boot": {workstation, func(h *testHost) {
		h.remove("sys/module/nvidia_uvm", "dev/nvidia-uvm", "dev/nvidia-uvm-tools")
		h.writeSpec()
	}, "error module-uvm", "gpu-cdi-plugin device make-nodes", ""},
	"no device node for unified memory": {workstation, func(h *testHost) {
		h.remove("dev/nvidia-uvm")
		h.writeSpec()
	}, "error node-missing", "gpu-cdi-plugin device make-nodes", ""},
	"no /dev/nvidiactl": {workstation, func(h *testHost) {
		h.remove("dev/nvidiactl")
		h.options.Devices = func(context.Context) (*gpu.Snapshot, error) {
			if _, err := os.Stat(h.at("dev/nvidiactl")); err != nil {
				return nil, gpu.ErrNoDriver
			}
			return h.node.Snapshot()
		}
	}, "error node-missing, error spec-stale", "does not exist", ""},
	"no device node of a GPU": {dgxNode, func(h *testHost) {
		h.remove("dev/nvidia3")
		h.writeSpec()
	}, "error node-missing", "/dev/nvidia3", ""},
	"no device node of a MIG device": {
		func(t *testing.T) *testHost { t.Helper(); return newHost(t, "mig-h100") },
		func(h *testHost) {
			s, err := h.node.Snapshot()
			testenv.Must(h.t, err)
			i := 0
			for len(s.Devices[i].MIG) == 0 {
				i++
			}
			h.remove(fmt.Sprintf("dev/nvidia-caps/nvidia-cap%d", s.Devices[i].MIG[0].ComputeInstanceCap))
			h.writeSpec()
		}, "error node-missing", "nvidia-caps/nvidia-cap", "",
	},
	"a regular file in place of a device node": {workstation, func(h *testHost) {
		h.remove("dev/nvidia0")
		h.write("dev/nvidia0", "")
		h.remove("run/cdi/nvidia.com-gpu.json")
	}, "error node-type, error spec-missing", "regular file", ""},
	"a device node from before the reboot": {workstation, func(h *testHost) {
		h.number("dev/nvidia-uvm", unix.Mkdev(250, 0))
	}, "error node-number, error spec-stale", "its number is 250:0, and that of its device is 511:0", ""},
	"a device node with the number of another GPU": {dgxNode, func(h *testHost) {
		h.number("dev/nvidia3", unix.Mkdev(195, 4))
		h.writeSpec()
	}, "error node-number", "its number is 195:4, and that of its device is 195:3", ""},
	"a device node of MIG's settings with an old number": {dgxNode, func(h *testHost) {
		h.number("dev/nvidia-caps/nvidia-cap1", unix.Mkdev(250, 1))
	}, "error node-number", "its number is 250:1, and that of its device is 510:1", ""},

	"containerd 1.7, where CDI is off": {kubeNode, func(h *testHost) {
		h.packages("containerd.io", "1.7.27-1", "kubelet", "1.36.3-1.1")
		h.write("etc/containerd/config.toml", "version = 2\n")
	}, "error cdi-off", "enable_cdi = true", ""},
	"containerd 1.6, which has no CDI": {kubeNode, func(h *testHost) {
		h.packages("containerd", "1.6.20~ds1-1", "kubelet", "1.36.3-1.1")
		h.remove("etc/containerd/config.toml")
	}, "error cdi-off", "version 1.6.20 of containerd does not know CDI", ""},
	"containerd 2 with CDI turned off in a drop-in": {kubeNode, func(h *testHost) {
		h.write("etc/containerd/config.toml", "version = 3\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n")
		h.write("etc/containerd/conf.d/10-cdi.toml", "version = 3\n[plugins.\"io.containerd.cri.v1.runtime\"]\n"+
			"enable_cdi = false\n")
	}, "error cdi-off", "/etc/containerd/conf.d/10-cdi.toml turns CDI off", ""},
	"containerd of unknown version": {kubeNode, func(h *testHost) {
		h.packages("kubelet", "1.36.3-1.1")
		h.write("etc/containerd/config.toml", "version = 2\n")
	}, "note cdi-unknown", "the version of containerd is unknown", ""},
	"docker 27, where CDI is off": {workstation, func(h *testHost) {
		h.program("usr/bin/dockerd")
		h.program("usr/bin/nvidia-cdi-hook")
		h.packages("docker-ce", "5:27.0.0-1")
	}, "error cdi-off", `"features": {"cdi": true}`, ""},
	"docker 28.2 with CDI turned off": {workstation, func(h *testHost) {
		h.program("usr/bin/dockerd")
		h.program("usr/bin/nvidia-cdi-hook")
		h.packages("docker-ce", "5:28.2.2-1")
		h.write("etc/docker/daemon.json", `{"features": {"cdi": false}}`)
	}, "error cdi-off", "daemon.json turns CDI off", ""},
	"docker 20, which has no CDI": {workstation, func(h *testHost) {
		h.program("usr/sbin/dockerd")
		h.program("usr/bin/nvidia-cdi-hook")
		h.packages("docker.io", "20.10.24+dfsg1-1")
	}, "error cdi-off", "install a newer version of docker", ""},
	"podman 3.4, which has no CDI": {workstation, func(h *testHost) {
		h.packages("podman", "3.4.4+ds1-1ubuntu1")
	}, "error cdi-off", "version 3.4.4 of podman does not know CDI", ""},
	"CRI-O without CDI directories": {workstation, func(h *testHost) {
		h.program("usr/bin/crio")
		h.write("etc/crio/crio.conf", "[crio.runtime]\ncdi_spec_dirs = []\n")
	}, "error cdi-off", "/etc/crio/crio.conf has an empty list", ""},
	"podman that reads specs elsewhere": {workstation, func(h *testHost) {
		h.packages("podman", "5.5.0")
		h.write("etc/containers/containers.conf.d/cdi.conf", "[engine]\ncdi_spec_dirs = [\"/etc/cdi\"]\n")
	}, "error spec-dir", "/etc/containers/containers.conf.d/cdi.conf", ""},
	"a spec where an older podman does not read, whatever its file says": {workstation, func(h *testHost) {
		h.write("etc/containers/containers.conf.d/cdi.conf", "[engine]\ncdi_spec_dirs = [\"/opt/cdi\"]\n")
		h.options.CDIDir = h.at("opt/cdi")
		h.writeSpec()
		h.remove("run/cdi/nvidia.com-gpu.json")
	}, "error spec-dir", "write the spec into one of them, with --cdi-dir", ""},
	"nerdctl that reads specs elsewhere": {workstation, func(h *testHost) {
		h.program("usr/local/bin/nerdctl")
		h.write("etc/nerdctl/nerdctl.toml", "cdi_spec_dirs = [\"/etc/cdi\"]\n")
	}, "error spec-dir", "/etc/nerdctl/nerdctl.toml", ""},
	"a containerd of Talos": {kubeNode, func(h *testHost) {
		h.write("etc/cri/conf.d/cri.toml", "version = 3\n")
	}, "note unchecked", "was not examined", ""},
	"podman gives all GPUs to each container": {workstation, func(h *testHost) {
		h.write("etc/containers/containers.conf", "[containers]\ndevices = [\"/dev/fuse\", \"nvidia.com/gpu=all\"]\n")
	}, "warning default-devices", "/etc/containers/containers.conf gives nvidia.com/gpu=all to each container", ""},
	"CRI-O gives a GPU's node to each container": {workstation, func(h *testHost) {
		h.program("usr/bin/crio")
		h.write("etc/crio/crio.conf", "[crio.runtime]\nadditional_devices = [\"/dev/nvidia0:/dev/nvidia0:rw\"]\n")
	}, "warning default-devices", "/etc/crio/crio.conf gives /dev/nvidia0", ""},
	"a spec of a later version than podman can read": {workstation, func(h *testHost) {
		h.packages("podman", "4.9.3+ds1-1ubuntu0.2")
		h.remove("run/cdi/nvidia.com-gpu.json")
		h.foreignSpec("run/cdi/nvidia.yaml")
		h.specVersion("run/cdi/nvidia.yaml", "0.7.0")
	}, "error spec-version", "it is of CDI version 0.7.0, and podman 4.9.3 can read 0.6.0 and earlier", ""},
	"a spec of a later version than docker can read": {workstation, func(h *testHost) {
		h.program("usr/bin/dockerd")
		h.program("usr/bin/nvidia-cdi-hook")
		h.packages("docker-ce", "5:25.0.5-1", "podman", "5.5.0")
		h.write("etc/docker/daemon.json", `{"features": {"cdi": true}}`)
		h.remove("run/cdi/nvidia.com-gpu.json")
		h.foreignSpec("run/cdi/nvidia.yaml")
		h.specVersion("run/cdi/nvidia.yaml", "0.7.0")
	}, "error spec-version", "docker 25.0.5 can read 0.6.0 and earlier", ""},
	"a WSL2": {workstation, func(h *testHost) {
		h.remove(h.node.LibDir(), "sys/module/nvidia", "proc/driver", "run/cdi/nvidia.com-gpu.json")
		h.write("dev/dxg", "")
	}, "error platform", "WSL2", ""},
	"a Jetson": {workstation, func(h *testHost) {
		h.remove(h.node.LibDir(), "sys/module/nvidia", "proc/driver", "run/cdi/nvidia.com-gpu.json")
		h.write("proc/device-tree/compatible", "nvidia,p3768-0000+p3767-0005\x00nvidia,tegra234\x00")
	}, "error platform", "Tegra (Jetson)", ""},
	"a spec where no engine reads": {workstation, func(h *testHost) {
		h.options.CDIDir = h.at("opt/cdi")
		h.writeSpec()
	}, "error spec-dir", "podman reads CDI specs in /etc/cdi, /var/run/cdi", ""},
	"a configuration of podman that is no TOML": {workstation, func(h *testHost) {
		h.write("etc/containers/containers.conf", "[engine\n")
	}, "error engine-config", "/etc/containers/containers.conf: line 1", ""},
	"a configuration of docker that is no JSON": {workstation, func(h *testHost) {
		h.program("usr/bin/dockerd")
		h.write("etc/docker/daemon.json", `{"features"`)
	}, "error engine-config", "/etc/docker/daemon.json", ""},
	"a FIFO in place of a configuration": {workstation, func(h *testHost) {
		testenv.Must(h.t, unix.Mkfifo(h.at("etc/containers/containers.conf"), 0o644))
	}, "error engine-config", "/etc/containers/containers.conf", ""},
	"docker that reads another file": {workstation, func(h *testHost) {
		h.program("usr/bin/dockerd")
		h.write("etc/systemd/system/docker.service.d/a.conf", "[Service]\nExecStart=\n"+
			"ExecStart=/usr/bin/dockerd --config-file /srv/daemon.json\n")
	}, "note unchecked", "docker reads this file", ""},
	"a containerd of k3s": {kubeNode, func(h *testHost) {
		h.write("var/lib/rancher/k3s/agent/etc/containerd/config.toml", "version = 3\n")
	}, "note unchecked", "was not examined", ""},
	"a default runtime by its name, which is gone": {workstation, func(h *testHost) {
		h.program("usr/bin/dockerd")
		h.program("usr/bin/nvidia-cdi-hook")
		h.packages("docker-ce", "5:28.2.2-1")
		h.write("etc/docker/daemon.json", `{"default-runtime": "youki", "runtimes": {"youki": {"path": "youki"}}}`)
	}, "error runtime-missing", "the runtime youki of docker is youki", ""},
	"NVIDIA's runtime as docker's default": {workstation, func(h *testHost) {
		h.program("usr/bin/dockerd")
		h.program("usr/bin/nvidia-container-runtime")
		h.program("usr/bin/nvidia-container-runtime-hook")
		h.packages("docker-ce", "5:28.2.2-1")
		h.write("etc/docker/daemon.json", `{"default-runtime": "nvidia",
			"runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}}`)
	}, "warning runtime-nvidia", "accept-nvidia-visible-devices-envvar-when-unprivileged", ""},
	"NVIDIA's runtime as containerd's default, from a drop-in": {kubeNode, func(h *testHost) {
		h.program("usr/bin/nvidia-container-runtime")
		h.write("etc/containerd/config.toml", "version = 3\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n")
		h.write("etc/containerd/conf.d/99-nvidia.toml", "version = 3\n"+
			"[plugins.\"io.containerd.cri.v1.runtime\".containerd]\ndefault_runtime_name = \"nvidia\"\n"+
			"[plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.nvidia]\nruntime_type = \"io.containerd.runc.v2\"\n"+
			"[plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.nvidia.options]\n"+
			"BinaryName = \"/usr/bin/nvidia-container-runtime\"\n")
	}, "warning runtime-nvidia", "/etc/containerd/conf.d/99-nvidia.toml", ""},
	"NVIDIA's runtime as CRI-O's default": {workstation, func(h *testHost) {
		h.program("usr/bin/crio")
		h.program("usr/bin/nvidia-container-runtime")
		h.write("etc/crio/crio.conf.d/99-nvidia.conf", "[crio.runtime]\ndefault_runtime = \"nvidia\"\n"+
			"[crio.runtime.runtimes.nvidia]\nruntime_path = \"/usr/bin/nvidia-container-runtime\"\n")
	}, "warning runtime-nvidia", "/etc/crio/crio.conf.d/99-nvidia.conf", ""},
	"a default runtime that is gone": {workstation, func(h *testHost) {
		h.program("usr/bin/dockerd")
		h.program("usr/bin/nvidia-cdi-hook")
		h.packages("docker-ce", "5:28.2.2-1")
		h.write("etc/docker/daemon.json", `{"default-runtime": "mine", "runtimes": {"mine": {"path": "/opt/mine"}}}`)
	}, "error runtime-missing", "/opt/mine, which does not exist", ""},
	"a runtime that is gone": {workstation, func(h *testHost) {
		h.program("usr/bin/dockerd")
		h.program("usr/bin/nvidia-cdi-hook")
		h.packages("docker-ce", "5:28.2.2-1")
		h.write("etc/docker/daemon.json", `{"runtimes": {"nvidia": {"path": "/usr/bin/nvidia-container-runtime"}}}`)
	}, "warning runtime-missing", "remove the runtime", ""},
	"NVIDIA's runtime behind gpu-cdi-runtime": {workstation, func(h *testHost) {
		h.program("usr/bin/nvidia-container-runtime")
		h.write("etc/docker/daemon.json", `{"default-runtime": "nvidia",
			"runtimes": {"nvidia": {"path": "/usr/bin/nvidia-container-runtime"}}}`)
		h.write("etc/gpu-cdi-plugin/runtime-docker.yaml", "runtime: /usr/bin/nvidia-container-runtime\n")
		h.program(h.options.Hook) // where hook install looks for it with --root
	}, "error runtime-behind", "rm HOST/etc/gpu-cdi-plugin/runtime-docker.yaml && gpu-cdi-plugin hook install docker", ""},
	"a link to NVIDIA's runtime behind gpu-cdi-runtime, for all engines": {workstation, func(h *testHost) {
		h.program("usr/bin/nvidia-container-runtime")
		h.link("opt/runtime", "/usr/bin/nvidia-container-runtime")
		h.write("etc/gpu-cdi-plugin/hook.yaml", "runtime: /opt/runtime\n")
	}, "error runtime-behind", "remove runtime: from /etc/gpu-cdi-plugin/hook.yaml", "the policy is the administrator's"},
	"a service that fails while its old spec is there": {workstation, func(h *testHost) {
		h.install("gpu-cdi-watch.service", "gpu-cdi-plugin.service")
		h.systemd(map[string][3]string{"gpu-cdi-watch.service": {"activating", "auto-restart", "exit-code"}})
	}, "error service-failed", "journalctl --lines=20 --unit=gpu-cdi-watch.service", ""},
	"no spec, because the service fails": {workstation, func(h *testHost) {
		h.install("gpu-cdi-watch.service")
		h.remove("run/cdi/nvidia.com-gpu.json")
		h.systemd(map[string][3]string{"gpu-cdi-watch.service": {"failed", "failed", "exit-code"}})
	}, "error service-failed, error spec-missing", "systemctl restart gpu-cdi-watch.service", ""},
	"a service that was stopped": {workstation, func(h *testHost) {
		h.install("gpu-cdi-watch.service", "gpu-cdi-plugin.service")
		h.systemd(nil)
	}, "warning service-stopped", "systemctl start gpu-cdi-watch.service", ""},
	"a service that was stopped, beside a socket": {workstation, func(h *testHost) {
		h.install("gpu-cdi-watch.service", "device-manager.socket")
		h.systemd(map[string][3]string{"device-manager.socket": {"active", "listening"}})
	}, "warning service-stopped", "systemctl start gpu-cdi-watch.service", ""},
	"only a socket is enabled": {workstation, func(h *testHost) {
		h.install("device-manager.socket")
		h.mount("run/cdi", 0)
		h.writeSpec()
		h.write("run/systemd/system/x", "")
	}, "note spec-volatile", "systemctl enable --now gpu-cdi-watch", ""},
	"the kubelet's directory without a kubelet": {workstation, func(h *testHost) {
		h.install("gpu-cdi-watch.service", "gpu-cdi-plugin.service", "device-manager.socket", "device-manager-leases.socket")
		testenv.Must(h.t, os.MkdirAll(h.at("var/lib/kubelet/pods"), 0o755))
	}, "error kubelet-dir", "rmdir HOST/var/lib/kubelet/pods && systemctl start gpu-cdi-watch.service " +
		"device-manager.socket device-manager-leases.socket", ""},
	"the kubelet's directory with pods that it has left": {workstation, func(h *testHost) {
		h.install("gpu-cdi-watch.service")
		h.write("var/lib/kubelet/pods/8c2e/etc-hosts", "")
	}, "error kubelet-dir", "rm -r HOST/var/lib/kubelet/pods", "the pods may be those of a kubelet that comes back"},
	"only the service for a kubelet is enabled, and there is none": {workstation, func(h *testHost) {
		h.install("gpu-cdi-plugin.service")
		h.mount("run/cdi", 0)
		h.writeSpec()
		h.write("run/systemd/system/x", "")
	}, "note spec-volatile", "systemctl enable --now gpu-cdi-watch", ""},
	"a configuration with a typo": {workstation, func(h *testHost) {
		h.write("etc/gpu-cdi-plugin/config.yaml", "mig-stategy: mixed\n")
	}, "error config-file", "mig-stategy", ""},
	"a configuration of device-manager with a wrong value": {workstation, func(h *testHost) {
		h.write("etc/device-manager/config.yaml", "topology-policy: best\n")
	}, "error config-file", "topology-policy", ""},
	"a policy with a mistake": {workstation, func(h *testHost) {
		h.write("etc/gpu-cdi-plugin/hook.yaml", "kind: nvidia.com/gpu\n")
	}, "error hook-config", "kind", "the policy is the administrator's"},
	"a policy that others can change": {workstation, func(h *testHost) {
		h.write("etc/gpu-cdi-plugin/hook.yaml", "allocated: true\n")
		h.options.TrustedHook = func(path string) error {
			if filepath.Base(path) == "hook.yaml" {
				return fmt.Errorf("%s: %w", path, trust.ErrUnsafe)
			}
			return nil
		}
	}, "error hook-config", "others can change it", "the policy is the administrator's"},
	"an engine's runtime that is no YAML": {workstation, func(h *testHost) {
		h.write("etc/gpu-cdi-plugin/runtime-crio.yaml", "runtime: [\n")
		h.program(h.options.Hook) // where hook install looks for it with --root
	}, "error hook-config", "gpu-cdi-plugin hook install crio", ""},
	"docker --gpus without a program": {workstation, func(h *testHost) {
		h.program("usr/bin/dockerd")
		h.packages("docker-ce", "5:28.2.2-1")
	}, "note docker-gpus", "docker run --device nvidia.com/gpu=all", ""},
	"podman allows too few processes": {workstation, func(h *testHost) {
		h.write("etc/containers/containers.conf", "[containers]\npids_limit = 5\n")
	}, "error pids-limit", "set pids_limit in /etc/containers/containers.conf to 11", ""},
	"the kubelet allows too few processes": {kubeNode, func(h *testHost) {
		h.write("var/lib/kubelet/config.yaml", "podPidsLimit: 10\n")
	}, "error pids-limit", "set podPidsLimit in /var/lib/kubelet/config.yaml to 11", ""},

	"an old spec of ours beside one that it shadows": {dgxNode, func(h *testHost) {
		h.foreignSpec("etc/cdi/nvidia.json")
		testenv.Must(h.t, h.node.SetMIG(0, []string{"1g.10gb"}))
		h.linkNodes()
	}, "error spec-stale", "rm HOST/etc/cdi/nvidia.json && gpu-cdi-plugin cdi generate --write", ""},
	"an old spec of ours in another file": {dgxNode, func(h *testHost) {
		testenv.Must(h.t, os.MkdirAll(h.at("etc/cdi"), 0o755),
			os.Rename(h.at("run/cdi/nvidia.com-gpu.json"), h.at("etc/cdi/nvidia.json")))
		testenv.Must(h.t, h.node.SetMIG(0, []string{"1g.10gb"}))
		h.linkNodes()
	}, "error spec-stale", "gpu-cdi-plugin cdi generate --file HOST/etc/cdi/nvidia.json", ""},
	"no spec": {workstation, func(h *testHost) {
		h.remove("run/cdi/nvidia.com-gpu.json")
	}, "error spec-missing", "gpu-cdi-plugin cdi generate --write", ""},
	"a device in two files": {workstation, func(h *testHost) {
		text, err := os.ReadFile(h.at("run/cdi/nvidia.com-gpu.json"))
		testenv.Must(h.t, err)
		h.write("run/cdi/nvidia.json", string(text))
	}, "error spec-conflict", "rm HOST/run/cdi/nvidia.json", ""},
	"NVIDIA's spec beside ours": {workstation, func(h *testHost) {
		h.foreignSpec("run/cdi/a-foreign.yaml")
	}, "error spec-conflict", "rm HOST/run/cdi/a-foreign.yaml", ""},
	"NVIDIA's spec beside ours, which comes back at each load of the driver": {workstation, func(h *testHost) {
		h.refresh("usr/lib/systemd/system")
		h.write("usr/lib/udev/rules.d/99-nvidia-cdi-refresh.rules", "ENV{SYSTEMD_WANTS}+=\"nvidia-cdi-refresh.service\"\n")
		h.foreignSpec("run/cdi/nvidia.yaml")
	}, "error spec-conflict, warning nvidia-refresh", "systemctl mask --now nvidia-cdi-refresh.path && " +
		"systemctl mask --now nvidia-cdi-refresh.service && rm HOST/run/cdi/nvidia.yaml", ""},
	"NVIDIA's spec alone, although our service is enabled": {workstation, func(h *testHost) {
		h.enable("gpu-cdi-watch.service")
		h.refresh("usr/lib/systemd/system")
		h.write("usr/lib/udev/rules.d/99-nvidia-cdi-refresh.rules", "ENV{SYSTEMD_WANTS}+=\"nvidia-cdi-refresh.service\"\n")
		h.remove("run/cdi/nvidia.com-gpu.json")
		h.foreignSpec("run/cdi/nvidia.yaml")
	}, "error spec-foreign, warning nvidia-refresh", "rm HOST/run/cdi/nvidia.yaml && gpu-cdi-plugin cdi generate " +
		"--write", ""},
	"a udev rule that will bring NVIDIA's spec": {workstation, func(h *testHost) {
		h.refresh("usr/lib/systemd/system")
		h.write("usr/lib/udev/rules.d/99-nvidia-cdi-refresh.rules", "ENV{SYSTEMD_WANTS}+=\"nvidia-cdi-refresh.service\"\n")
	}, "warning nvidia-refresh", "/usr/lib/udev/rules.d/99-nvidia-cdi-refresh.rules starts it at each load of the " +
		"driver", ""},
	"an older toolkit's service, which cannot be masked": {workstation, func(h *testHost) {
		h.refresh("etc/systemd/system")
		h.enable("nvidia-cdi-refresh.path")
	}, "warning nvidia-refresh", "systemctl disable --now nvidia-cdi-refresh.path", ""},
	"a udev rule for a service that cannot be masked": {workstation, func(h *testHost) {
		h.refresh("etc/systemd/system")
		h.write("usr/lib/udev/rules.d/99-nvidia-cdi-refresh.rules", "ENV{SYSTEMD_WANTS}+=\"nvidia-cdi-refresh.service\"\n")
	}, "warning nvidia-refresh", "rm HOST/etc/systemd/system/nvidia-cdi-refresh.service && systemctl daemon-reload && " +
		"systemctl mask --now nvidia-cdi-refresh.service", ""},
	"a spec with an unknown key": {workstation, func(h *testHost) {
		h.write("etc/cdi/broken.json", `{"cdiVersion": "0.5.0", "kind": "a.com/b", "what": 1}`)
	}, "error spec-unreadable", "what", "only who wrote it knows whether it is needed"},
	"a spec of ours that is damaged": {workstation, func(h *testHost) {
		h.write("run/cdi/nvidia.com-gpu.json", "{")
	}, "error spec-unreadable, error spec-missing", "rm HOST/run/cdi/nvidia.com-gpu.json", ""},
	"a file in place of /etc/cdi": {workstation, func(h *testHost) {
		h.write("etc/cdi", "")
	}, "error spec-unreadable, error spec-missing", "not a directory", ""},
	"a spec that only root can read": {workstation, func(h *testHost) {
		testenv.Must(h.t, os.Chmod(h.at("run/cdi/nvidia.com-gpu.json"), 0o600))
	}, "warning spec-private", "chmod a+rX", ""},
	"a directory of specs that only root can read": {workstation, func(h *testHost) {
		testenv.Must(h.t, os.Chmod(h.at("run/cdi"), 0o700))
	}, "warning spec-private", "chmod a+rX", ""},
	"a spec from before MIG was turned on": {dgxNode, func(h *testHost) {
		testenv.Must(h.t, h.node.SetMIG(0, []string{"1g.10gb"}))
		h.linkNodes()
	}, "error spec-stale", "device 0", ""},
	"a spec without a hook, from before MIG was turned on": {dgxNode, func(h *testHost) {
		h.options.Hook = ""
		h.writeSpec()
		testenv.Must(h.t, h.node.SetMIG(0, []string{"1g.10gb"}))
		h.linkNodes()
	}, "error spec-stale", "device 0", ""},
	"a spec of another program, of a GPU that is gone": {workstation, func(h *testHost) {
		h.remove("run/cdi/nvidia.com-gpu.json")
		h.write("run/cdi/nvidia.yaml", `{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [
			{"name": "GPU-00000000-0000-0000-0000-000000000000", "containerEdits": {"env": ["A=B"]}}]}`)
	}, "error spec-stale", "rm HOST/run/cdi/nvidia.yaml && gpu-cdi-plugin cdi generate --write", ""},
	"a spec of NVIDIA's toolkit, of a GPU that is gone": {workstation, func(h *testHost) {
		h.program("usr/bin/nvidia-ctk")
		h.remove("run/cdi/nvidia.com-gpu.json")
		h.write("run/cdi/nvidia.yaml", `{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [
			{"name": "GPU-00000000-0000-0000-0000-000000000000", "containerEdits": {"env": ["A=B"]}}]}`)
	}, "error spec-stale", "nvidia-ctk cdi generate --output=HOST/run/cdi/nvidia.yaml", "it runs NVIDIA's program"},
	"a spec that others can change": {workstation, func(h *testHost) {
		h.options.TrustedFile = trust.File
		testenv.Must(h.t, os.Chmod(h.at("run/cdi/nvidia.com-gpu.json"), 0o666))
	}, "error spec-unsafe", "its hooks run as root", ""},
	"a directory of specs that others can change, without a spec": {workstation, func(h *testHost) {
		h.options.TrustedDir = trust.Dir
		h.remove("run/cdi/nvidia.com-gpu.json")
		testenv.Must(h.t, os.Chmod(h.at("run/cdi"), 0o777))
	}, "error dir-unsafe, error spec-missing", "chmod go-w HOST/run/cdi", ""},
	"a state directory on a tmpfs": {workstation, func(h *testHost) {
		h.mount("var/lib/gpu-cdi-plugin", 0)
	}, "warning state-tmpfs", "--state-dir", ""},
	"a spec that a reboot removes": {workstation, func(h *testHost) {
		h.mount("run/cdi", 0)
		h.writeSpec()
		h.write("run/systemd/system/x", "")
	}, "note spec-volatile", "systemctl enable --now gpu-cdi-watch", ""},
	"a read-only state directory": {workstation, func(h *testHost) {
		h.mount("var/lib/gpu-cdi-plugin", unix.MS_RDONLY)
	}, "error dir-read-only", "--state-dir", ""},

	"a kubelet whose socket does not answer": {kubeNode, func(h *testHost) {
		h.kubelet.Stop()
	}, "error kubelet-socket", "--device-plugin-dir", ""},
	"a kubelet that does not run": {kubeNode, func(h *testHost) {
		h.kubelet.Stop()
		h.remove("proc/4711")
	}, "warning kubelet-stopped", "systemctl start kubelet", ""},
	"a kubelet with another root directory": {kubeNode, func(h *testHost) {
		h.runKubelet("/usr/bin/kubelet", "--root-dir", "/data/kubelet")
		h.options.Watcher = true
	}, "error kubelet-root-dir", "--plugins-registry-dir /data/kubelet/plugins_registry", ""},
	"no socket with the devices of pods": {kubeNode, func(h *testHost) {
		h.kubelet.StopPods()
	}, "warning kubelet-pods", "--pod-resources-socket", ""},
	"a kubelet that passes no CDI devices on": {kubeNode, func(h *testHost) {
		h.write("var/lib/kubelet/config.yaml", "featureGates:\n  DevicePluginCDIDevices: false\n")
	}, "warning kubelet-cdi", "turns the feature DevicePluginCDIDevices off", ""},
	"a kubelet before 1.29": {kubeNode, func(h *testHost) {
		h.packages("kubelet", "1.27.4-00", "containerd.io", "2.1.4-1")
	}, "warning kubelet-cdi", "version 1.27.4", ""},
	"a kubelet's configuration that is no YAML": {kubeNode, func(h *testHost) {
		h.write("var/lib/kubelet/config.yaml", "a: [\n")
	}, "note unchecked", "it cannot be read", ""},
	"NVIDIA's plugin beside ours": {kubeNode, func(h *testHost) {
		h.listen(h.options.PluginDir + "/nvidia-gpu.sock")
		h.listen(h.options.PluginDir + "/gpu-cdi-nvidia-com-gpu.sock")
	}, "error plugin-other", "another device plugin", ""},
	"NVIDIA's plugin alone": {kubeNode, func(h *testHost) {
		h.listen(h.options.PluginDir + "/nvidia-gpu.sock")
	}, "note plugin-other", "gpu-cdi-plugin serve does not run", ""},
	"a process that is NVIDIA's plugin": {kubeNode, func(h *testHost) {
		h.listen(h.options.PluginDir + "/gpu-cdi-nvidia-com-gpu.sock")
		h.write("proc/99/comm", "nvidia-device-p\n")
	}, "error plugin-other", "another device plugin", ""},
	"a resource that outlived its plugin": {kubeNode, func(h *testHost) {
		h.kubelet.Pods.Allocatable = map[string][]string{"nvidia.com/gpu": {"GPU-a", "GPU-b"}, "a.com/b": {"x"}}
	}, "error plugin-gone", "the kubelet has 2 of it", ""},

	"a hook whose program is gone": {workstation, func(h *testHost) {
		h.write("usr/share/containers/oci/hooks.d/10-gone.json", hookDocumentOf("/usr/libexec/gone"))
	}, "error hook-program", "rm HOST/usr/share/containers/oci/hooks.d/10-gone.json", ""},
	"our own hook document whose program is gone": {workstation, func(h *testHost) {
		h.options.Hook = "/opt/prestart-hook" // of the host below --root
		h.program("opt/prestart-hook")
		h.run("hook", "install", "live")
		h.remove("opt")
		h.options.Hook = h.at("usr/libexec/prestart-hook")
	}, "error hook-program", "gpu-cdi-plugin hook uninstall live", ""},
	"a hook document of ours that nothing installed": {workstation, func(h *testHost) {
		h.write("etc/containers/oci/hooks.d/50-gpu-cdi-plugin.json", hookDocumentOf("/opt/prestart-hook"))
	}, "error hook-program", "rm HOST/etc/containers/oci/hooks.d/50-gpu-cdi-plugin.json", ""},
	"a hook that is not executable": {workstation, func(h *testHost) {
		h.write("usr/libexec/flat", "")
		h.write("etc/containers/oci/hooks.d/10-flat.json", hookDocumentOf("/usr/libexec/flat"))
	}, "error hook-program", "chmod 755 HOST/usr/libexec/flat", ""},
	"a hook in the directory that podman is configured with": {workstation, func(h *testHost) {
		h.write("etc/containers/containers.conf", "[engine]\nhooks_dir = [\"/srv/hooks\"]\n")
		h.write("srv/hooks/a.json", hookDocumentOf("/usr/libexec/gone"))
		h.write("usr/share/containers/oci/hooks.d/10-unread.json", hookDocumentOf("/usr/libexec/gone"))
	}, "error hook-program", "rm HOST/srv/hooks/a.json", ""},
	"a hook document that is no JSON": {workstation, func(h *testHost) {
		h.write("usr/share/containers/oci/hooks.d/10-bad.json", "{")
	}, "error hook-file", "it cannot be used", ""},
	"NVIDIA's older hook": {workstation, func(h *testHost) {
		h.program("usr/bin/nvidia-container-toolkit")
		h.write("usr/share/containers/oci/hooks.d/oci-nvidia-hook.json", hookDocumentOf("/usr/bin/nvidia-container-toolkit"))
	}, "warning hook-nvidia", "rm HOST/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json", ""},
	"a hook that others can change": {workstation, func(h *testHost) {
		h.program("usr/libexec/other")
		h.write("usr/share/containers/oci/hooks.d/10-other.json", hookDocumentOf("/usr/libexec/other"))
		testenv.Must(h.t, os.Chmod(h.at("usr/libexec/other"), 0o777))
		h.options.TrustedHook = trust.RootFile
	}, "error hook-unsafe", "others can change it", ""},
	"no prestart-hook": {workstation, func(h *testHost) {
		h.options.Hook = h.at("usr/libexec/elsewhere")
	}, "error hook-missing", "--hook-path", "it installs this product"},
	"a prestart-hook that is not executable": {workstation, func(h *testHost) {
		testenv.Must(h.t, os.Chmod(h.options.Hook, 0o644))
	}, "error hook-missing", "chmod 755", ""},
	"a prestart-hook that was not found": {workstation, func(h *testHost) {
		h.options.Hook, h.options.NoHook = "", errors.New("no such file")
	}, "note unchecked", "no such file", ""},
	"SELinux forbids devices": {workstation, func(h *testHost) {
		h.write("sys/fs/selinux/enforce", "1")
		h.write("sys/fs/selinux/booleans/container_use_devices", "0 0")
	}, "warning selinux", "setsebool -P container_use_devices on", ""},
	"a low limit of inotify instances": {workstation, func(h *testHost) {
		h.write("proc/sys/fs/inotify/max_user_instances", "64\n")
	}, "warning inotify", "sysctl -w fs.inotify.max_user_instances", ""},
	"no inotify instances left": {workstation, func(h *testHost) {
		h.write("proc/77/status", "Name:\tx\nUid:\t0\t0\t0\t0\n")
		for fd := range 120 {
			h.link(fmt.Sprintf("proc/77/fd/%d", fd), "anon_inode:inotify")
		}
	}, "warning inotify", "root has 120", ""},
	"control groups of both versions": {workstation, func(h *testHost) {
		h.remove("sys/fs/cgroup")
		h.write("sys/fs/cgroup/devices/tasks", "")
		h.write("sys/fs/cgroup/unified/cgroup.controllers", "")
	}, "warning cgroup-hybrid", "systemd.unified_cgroup_hierarchy=1", ""},
	"control groups that the kubelet refuses": {kubeNode, func(h *testHost) {
		h.remove("sys/fs/cgroup")
		h.write("sys/fs/cgroup/devices/tasks", "")
	}, "error cgroup-v1", "failCgroupV1", ""},
	"no links for systemd": {kubeNode, func(h *testHost) {
		h.remove("dev/char")
	}, "warning dev-char", "L+ /dev/char/195:0 - - - - ../nvidia0", ""},
	"processes that this process does not see": {workstation, func(h *testHost) {
		h.link("proc/thread-self/ns/pid", "pid:[4026532000]")
	}, "note unchecked", "the use of inotify", ""},
}

func TestGoVersion(t *testing.T) {
	for module, c := range map[string]struct {
		version string
		want    []int
	}{
		"github.com/moby/moby/v2":             {"v2.0.0-beta.24", []int{29}},
		"github.com/containerd/containerd/v2": {"(devel)", []int{2}},
		"github.com/containerd/containerd":    {"(devel)", []int{1}},
		"github.com/docker/docker":            {"v28.0.1+incompatible", []int{28, 0, 1}},
		"github.com/containers/podman/v5":     {"", []int{5}},
		"k8s.io/kubernetes":                   {"v0.0.0-20260101000000-abc", nil},
		"github.com/cri-o/cri-o":              {"v1.36.3", []int{1, 36, 3}},
	} {
		if diff := cmp.Diff(c.want, goVersion(module, c.version)); diff != "" {
			t.Errorf("%s %s: %s", module, c.version, diff)
		}
	}
}

// The version of the CDI library that Go has written into a program counts, whatever its package says.
func TestTheCDIVersionOfAProgram(t *testing.T) {
	h := workstation(t)
	built, err := program()
	testenv.Must(t, err, os.Remove(h.at("usr/bin/podman")))
	data, err := os.ReadFile(built)
	testenv.Must(t, err, os.WriteFile(h.at("usr/bin/podman"), data, 0o755))
	f := &facts{Options: h.options}
	e := engine{name: "podman", program: "/usr/bin/podman", version: []int{4, 9, 3}}
	if diff := cmp.Diff([]int{1, 1}, f.cdiOf(&e)); diff != "" {
		t.Error(diff)
	}
	e.program = "/usr/bin/crun" // a script
	if diff := cmp.Diff([]int{0, 6}, f.cdiOf(&e)); diff != "" {
		t.Error(diff)
	}
}

func TestComparisonWithAMajorVersion(t *testing.T) {
	for _, c := range []struct {
		version, other  []int
		before, isSince bool
	}{
		{[]int{2}, []int{2, 0}, false, true},
		{[]int{1}, []int{2, 0}, true, false},
		{[]int{1}, []int{1, 7}, false, false}, // unknown
		{[]int{29}, []int{28, 2}, false, true},
		{nil, []int{2, 0}, false, false},
		{[]int{28, 1, 9}, []int{28, 2}, true, false},
		{[]int{28, 2}, []int{28, 2}, false, true},
	} {
		if before(c.version, c.other...) != c.before || isSince(c.version, c.other...) != c.isSince {
			t.Errorf("%v and %v", c.version, c.other)
		}
	}
}

// The documentation has a row for each kind of finding, and each kind has a test that makes the fault.
func TestEveryKindOfFindingHasATest(t *testing.T) {
	tested := map[string]bool{
		"hook-noexec": true, "try-failed": true, "try-differs": true, // they have tests of their own
	}
	for _, c := range faults {
		for line := range strings.SplitSeq(c.want, ", ") {
			_, id, _ := strings.Cut(line, " ")
			tested[id] = true
		}
	}
	for _, k := range catalogue {
		if !tested[k.id] {
			t.Errorf("no test makes the fault of %s", k.id)
		}
	}
	for id := range advice {
		if !tested[id] {
			t.Errorf("advice for %s, which is no finding", id)
		}
	}
}

func TestAHookOnANoexecMount(t *testing.T) {
	h := workstation(t)
	h.mount("opt", unix.MS_NOEXEC)
	h.program("opt/prestart-hook")
	h.options.Hook = h.at("opt/prestart-hook")
	if diff := cmp.Diff([]string{"error hook-noexec"}, ids(h.examine())); diff != "" {
		t.Error(diff)
	}
}

var update = flag.Bool("update", false, "write the table in the documentation")

func TestTheDocumentationHasAllFindings(t *testing.T) {
	var table strings.Builder
	table.WriteString("| finding | what is wrong | why it matters | what mends it |\n|---|---|---|---|\n")
	for _, k := range catalogue {
		fix := strings.NewReplacer("{subject}", "FILE", "|", `\|`).Replace(k.fix)
		fmt.Fprintf(&table, "| `%s` (%s) | %s | %s | %s |\n", k.id, k.severity, k.wrong, k.why, fix)
	}
	const file, mark = "../../../docs/doctor.md", "<!-- findings -->\n"
	data, err := os.ReadFile(file)
	testenv.Must(t, err)
	head, got, _ := strings.Cut(string(data), mark)
	if *update {
		got = table.String()
		testenv.Must(t, os.WriteFile(file, []byte(head+mark+got), 0o644))
	}
	if diff := cmp.Diff(table.String(), got); diff != "" {
		t.Errorf("%s (-want +got; -update writes it):\n%s", file, diff)
	}
}

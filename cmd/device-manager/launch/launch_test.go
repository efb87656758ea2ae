package launch

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/manager/model"
)

// leased are the run options and IDs of two GPUs.
var (
	leased     = model.RunOptions{CDIDevices: []string{"nvidia.com/gpu=GPU-1", "nvidia.com/gpu=GPU-2"}}
	leasedIDs  = []string{"GPU-1", "GPU-2"}
	leasedGPUs = Lease{RunOptions: leased, IDs: leasedIDs}
)

const (
	cdi   = "--device=nvidia.com/gpu=GPU-1 --device=nvidia.com/gpu=GPU-2"
	uuids = "CUDA_VISIBLE_DEVICES=GPU-1,GPU-2"
)

func TestFor(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		command, want string // with a blank between arguments
		env           string
		bare          bool
		note          string // a part of the only note; empty means none
	}{
		"podman run gets its options behind the subcommand": {
			command: "podman run --rm -it image nvidia-smi -L",
			want:    "podman run " + cdi + " --rm -it image nvidia-smi -L",
		},
		"an engine is known by the base name of its path": {
			command: "/usr/bin/podman run image", want: "/usr/bin/podman run " + cdi + " image",
		},
		"docker has run below container": {
			command: "docker container run image", want: "docker container run " + cdi + " image",
		},
		"a container in the background, which is not started again": {
			command: "docker run -d --restart no image", want: "docker run " + cdi + " -d --restart no image",
		},
		"with a placeholder a container can start later": {
			command: "podman create {podman} image", want: "podman create " + cdi + " image",
		},
		"options before the subcommand can have values in the next argument": {
			command: "podman --root run --log-level=run -r -c run --storage-opt run run image",
			want:    "podman --root run --log-level=run -r -c run --storage-opt run run " + cdi + " image",
		},
		"docker's short options can have values in the same argument": {
			command: "docker -Hunix:///run -Dl debug -c=run run image",
			want:    "docker -Hunix:///run -Dl debug -c=run run " + cdi + " image",
		},
		"options can be between container and run": {
			command: "nerdctl container -n run run image", want: "nerdctl container -n run run " + cdi + " image",
		},
		"an unknown option before the subcommand can have its value in the same argument": {
			command: "podman --new=run run image", want: "podman --new=run run " + cdi + " image",
		},
		"options behind the image are the command's": {
			command: "podman run -i image train --gpus 8 --privileged --device nvidia.com/gpu=all",
			want:    "podman run " + cdi + " -i image train --gpus 8 --privileged --device nvidia.com/gpu=all",
		},
		"options behind -- are the command's": {
			command: "docker run -- image --gpus=all", want: "docker run " + cdi + " -- image --gpus=all",
		},
		"the value of an option is no option": {
			command: "docker run --name --privileged -w --gpus image",
			want:    "docker run " + cdi + " --name --privileged -w --gpus image",
		},
		"other devices and variables stay": {
			command: "podman run --device /dev/fuse --device=vendor.com/nic=0 -e A=1 -v /dev/shm:/dev/shm image",
			want: "podman run " + cdi +
				" --device /dev/fuse --device=vendor.com/nic=0 -e A=1 -v /dev/shm:/dev/shm image",
		},
		"a container that asks not to be privileged and for no GPUs": {
			command: "docker run --privileged=false -e NVIDIA_VISIBLE_DEVICES=void image",
			want:    "docker run " + cdi + " --privileged=false -e NVIDIA_VISIBLE_DEVICES=void image",
		},
		"a mount of /dev may open other devices in a rootless engine": {
			command: "podman run -v /dev:/host image", want: "podman run " + cdi + " -v /dev:/host image",
			note: "--volume=/dev:/host may let the container use other devices",
		},
		"a mount of a node may open it": {
			command: "docker run --mount type=bind,src=/dev/nvidia7,dst=/x image",
			want:    "docker run " + cdi + " --mount type=bind,src=/dev/nvidia7,dst=/x image",
			note:    "--mount=type=bind,src=/dev/nvidia7,dst=/x may let",
		},
		"a rule of the device cgroup may open other devices": {
			command: "docker run --device-cgroup-rule=a image", want: "docker run " + cdi +
				" --device-cgroup-rule=a image", note: "--device-cgroup-rule=a may let",
		},
		"podman without cgroups does not limit devices": {
			command: "podman run --cgroups disabled image", want: "podman run " + cdi + " --cgroups disabled image",
			note: "--cgroups=disabled may let",
		},
		"apptainer gets --nv and variables": {
			command: "apptainer -d -c conf exec -B /a image.sif train",
			want:    "apptainer -d -c conf exec --nv -B /a image.sif train",
			env:     "APPTAINERENV_" + uuids, note: "apptainer gives the container all GPUs of the host, and only",
		},
		"singularity can be a link to apptainer": {
			command: "singularity run image.sif x", want: "singularity run --nv image.sif x",
			env:  "APPTAINERENV_" + uuids + " SINGULARITYENV_" + uuids,
			note: "singularity gives the container all GPUs of the host, and only",
		},
		"any other command gets CUDA's variable": {
			command: "python3 train.py --gpus 2", want: "python3 train.py --gpus 2", env: uuids, bare: true,
		},
		"a command that runs an engine gets a note": {
			command: "sudo -E docker run image", want: "sudo -E docker run image", env: uuids, bare: true,
			note: "sudo runs docker without the devices: only a command that begins with an engine gets options for " +
				"them; add the argument {docker} behind its run",
		},
		"a command that only names an engine gets none": {
			command: "apt-get install podman", want: "apt-get install podman", env: uuids, bare: true,
		},
		"{podman} becomes podman's options, wherever they are wanted": {
			command: "sudo podman run --rm {podman} image", want: "sudo podman run --rm " + cdi + " image", env: uuids,
		},
		"{cdi} in a command that runs an engine": {
			command: "sudo podman run --device={cdi} image", env: uuids,
			want: "sudo podman run --device=nvidia.com/gpu=GPU-1,nvidia.com/gpu=GPU-2 image",
		},
		"with a placeholder nothing is inserted or refused": {
			command: "podman run --privileged {podman} image", want: "podman run --privileged " + cdi + " image",
		},
		"{uuids} names the devices of docker": {
			command: "docker run --gpus device={uuids} image", want: "docker run --gpus device=GPU-1,GPU-2 image",
		},
		"{uuids} in a bare command": {
			command: "train --gpus={uuids}", want: "train --gpus=GPU-1,GPU-2", env: uuids, bare: true,
		},
		"{cdi} has the names": {
			command: "apptainer exec --contain --device {cdi} image.sif train",
			want: "apptainer exec --contain --device nvidia.com/gpu=GPU-1,nvidia.com/gpu=GPU-2 " +
				"image.sif train",
		},
		"{cdi} in another subcommand": {
			command: "podman build --device={cdi} .",
			want:    "podman build --device=nvidia.com/gpu=GPU-1,nvidia.com/gpu=GPU-2 .",
		},
		"{count} is a number, and the devices are given as usual": {
			command: "torchrun --nproc-per-node={count} train.py", want: "torchrun --nproc-per-node=2 train.py",
			env: uuids, bare: true,
		},
		"{count} behind an image": {
			command: "podman run image torchrun --nproc-per-node={count}",
			want:    "podman run " + cdi + " image torchrun --nproc-per-node=2",
		},
		"other words in braces stay": {
			command: "xargs -I{} sh -c echo${count}${uuids}{{cdi}}{{.Names}}{gpus}{CDI}{a,b}{{{count}}}",
			want:    "xargs -I{} sh -c echo${count}${uuids}{{cdi}}{{.Names}}{gpus}{CDI}{a,b}{{{count}}}",
			env:     uuids, bare: true,
		},
		"a placeholder in JSON": {
			command: `run {"n":{count}}{count}`, want: `run {"n":2}2`, env: uuids, bare: true,
		},
		"the program is no placeholder": {command: "{count}", want: "{count}", env: uuids, bare: true},
		"runc with a placeholder":       {command: "runc run {uuids}", want: "runc run GPU-1,GPU-2"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, err := For(strings.Split(c.command, " "), leasedGPUs)
			if err != nil {
				t.Fatal(err)
			}
			got := []any{strings.Join(p.Args, " "), strings.Join(p.Env, " "), p.Bare}
			if diff := cmp.Diff([]any{c.want, c.env, c.bare}, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
			if notes := strings.Join(p.Notes, "\n"); (notes == "") != (c.note == "") || !strings.Contains(notes, c.note) ||
				len(p.Notes) > 1 {
				t.Errorf("notes are %q, want %q", notes, c.note)
			}
		})
	}
}

func TestForRefuses(t *testing.T) {
	t.Parallel()
	const others = "the container would get other GPUs than the leased ones"
	for command, want := range map[string]string{
		"":       "there is no command to run",
		"podman": "podman is called without a command that gets devices: use podman run, container run, or",
		"podman build .": "podman build is no command that gets devices: use podman run, container run, or " +
			"say where the devices belong with a placeholder ({podman}, {cdi} or {uuids})",
		"docker compose up":           "docker compose is no command",
		"docker container ls":         "docker container ls is no command",
		"nerdctl -- run image":        "nerdctl: unknown option -- before the command",
		"podman --new run image":      "podman: unknown option --new before the command: write its value as --new=",
		"podman -Z run image":         "podman: unknown option -Z before the command",
		"docker -l run":               "docker is called without a command",
		"apptainer build x.sif x.def": "apptainer build is no command that gets devices: use apptainer run, exec, shell,",
		"apptainer instance stop x":   "apptainer instance stop is no command",
		"podman-compose up":           "podman-compose cannot be given devices by itself: use podman run",
		"runc exec x sh":              "runc exec is no command that gets devices: use runc run, or say where",
		"crun run -f c.json":          "crun: the devices belong into the config.json of the bundle: leave out --config",

		"docker run --gpus all image":                             "docker --gpus=all: " + others + ": remove the option",
		"docker run -it --gpus=1 image":                           others,
		"podman run --new value --gpus all image":                 others,
		"podman run -itv /a:/b --device nvidia.com/gpu=all image": "podman --device=nvidia.com/gpu=all: " + others,
		"podman run --device=vendor.com/nic=0,nvidia.com/gpu=0 x": others,
		"nerdctl run --device=management.nvidia.com/gpu=all x":    others,
		"docker run --device /dev/nvidia0:/dev/x image":           others,
		"docker run --device=/dev image":                          others,
		"docker run --device=/dev/./nvidia-caps/nvidia-cap1 x":    others,
		"docker run -eNVIDIA_VISIBLE_DEVICES=all image":           others,
		"docker run --env NVIDIA_VISIBLE_DEVICES image":           others,
		"podman run --annotation=cdi.k8s.io/x=nvidia.com/gpu=0 x": others,
		"apptainer exec -B /a --device nvidia.com/gpu=0 x.sif sh": "placeholder ({cdi} or {uuids})",
		"docker run -it --privileged image": "docker --privileged=true: the container could use all devices of the " +
			"host: remove the option, or pass the devices with a placeholder ({docker}, {cdi} or {uuids})",
		"sh -c run_{podman}_x": `argument "run_{podman}_x": {podman} becomes several arguments, so it must be an ` +
			"argument of its own",
	} {
		t.Run(command, func(t *testing.T) {
			t.Parallel()
			p, err := For(strings.Split(command, " "), leasedGPUs)
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%v, %v, want %s", p, err, want)
			}
		})
	}
}

// A container that starts when its lease has ended would have GPUs that others are given.
func TestForRefusesWhatStartsLater(t *testing.T) {
	t.Parallel()
	for _, command := range []string{
		"podman create image", "docker container create image", "nerdctl create image",
		"docker run --restart always image", "podman run -d --restart=on-failure:3 image",
		"apptainer instance start image.sif x", "singularity instance run image.sif x", "runc create x", "crun create x",
	} {
		t.Run(command, func(t *testing.T) {
			t.Parallel()
			p, err := For(strings.Split(command, " "), leasedGPUs)
			if !errors.Is(err, ErrCannotFollow) || !strings.Contains(err.Error(), "a placeholder ({") {
				t.Errorf("%v, %v", p, err)
			}
		})
	}
}

// podman's container ends with the lease even if podman is killed.
func TestForALimitedTime(t *testing.T) {
	t.Parallel()
	for command, want := range map[string]string{
		"podman run image":                          "podman run " + cdi + " --timeout=3601 image",
		"/usr/bin/podman container run image sleep": "/usr/bin/podman container run " + cdi + " --timeout=3601 image sleep",
		"podman run --timeout 5 image":              "podman run " + cdi + " --timeout 5 image",
		"podman run --timeout=0 image":              "podman run " + cdi + " --timeout=0 image",
		"podman run --stop-timeout 5 image":         "podman run " + cdi + " --timeout=3601 --stop-timeout 5 image",
		"podman run {podman} image":                 "podman run " + cdi + " image",
		"docker run image":                          "docker run " + cdi + " image",
		"nerdctl run image":                         "nerdctl run " + cdi + " image",
	} {
		t.Run(command, func(t *testing.T) {
			t.Parallel()
			limited := leasedGPUs
			limited.Limit = time.Hour + time.Millisecond
			p, err := For(strings.Split(command, " "), limited)
			if got := strings.Join(p.Args, " "); err != nil || got != want {
				t.Errorf("%s, %v, want %s", got, err, want)
			}
		})
	}
}

// The command line of a runtime stays as it is: its container has the run options from the bundle.
func TestForRuntimes(t *testing.T) {
	for command, bundle := range map[string]string{
		"runc run x": ".",
		"/sbin/crun run --detach=0 -b /bundles/a x":       "/bundles/a",
		"runc --root /run/x run --bundle=b --keep x":      "b",
		"runc --log-format json run --pid-file p -b b x":  "b",
		"runc run x -b other":                             ".",
		"crun --systemd-cgroup run --console-socket -b x": ".",
		"runc run -b {uuids} x":                           "",
	} {
		t.Run(command, func(t *testing.T) {
			args := strings.Split(command, " ")
			p, err := For(args, leasedGPUs)
			if err != nil {
				t.Fatal(err)
			}
			want := Plan{Args: args, Bundle: bundle}
			if bundle == "" { // placeholders say where the devices belong
				want.Args = p.Args
			}
			if diff := cmp.Diff(want, p); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}

func TestForOtherDevices(t *testing.T) {
	t.Parallel()
	devices := model.RunOptions{
		Envs:    map[string]string{"NVIDIA_VISIBLE_DEVICES": "void"},
		Devices: []model.DeviceNode{{ContainerPath: "/dev/nvidia0", HostPath: "/dev/nvidia0", Permissions: "rw"}},
	}
	mps := model.RunOptions{
		Envs: map[string]string{
			"CUDA_MPS_PIPE_DIRECTORY": "/run/mps/pipe", "CUDA_VISIBLE_DEVICES": "7", "OTHER": "/run/mps2",
		},
		Mounts: []model.Mount{{ContainerPath: "/run/mps", HostPath: "/x"}},
	}
	nic := model.RunOptions{CDIDevices: []string{"vendor.com/nic=1"}}
	for name, c := range map[string]struct {
		command string
		options model.RunOptions
		ids     []string
		want    Plan
		err     string
	}{
		"device nodes and variables of an engine": {
			"podman run x", devices,
			[]string{"GPU-1"},
			Plan{
				Args: []string{
					"podman", "run", "--device=/dev/nvidia0:/dev/nvidia0:rw", "--env=NVIDIA_VISIBLE_DEVICES=void", "x",
				},
			},
			"",
		},
		"variables of a bare command": {
			"train", devices,
			[]string{"GPU-1"},
			Plan{
				Args: []string{"train"}, Env: []string{"NVIDIA_VISIBLE_DEVICES=void", "CUDA_VISIBLE_DEVICES=GPU-1"},
				Bare: true,
			},
			"",
		},
		"a variable for a mount that a bare command does not have": {
			"train", mps,
			[]string{"GPU-1"},
			Plan{
				Args: []string{"train"}, Env: []string{"OTHER=/run/mps2", "CUDA_VISIBLE_DEVICES=GPU-1"}, Bare: true,
				Notes: []string{`CUDA_MPS_PIPE_DIRECTORY is not set: "/run/mps/pipe" exists only in containers`},
			},
			"",
		},
		"an engine to which the plugin gives only annotations": {
			"docker run x",
			model.RunOptions{Annotations: map[string]string{"a": "b"}},
			[]string{"GPU-1"},
			Plan{
				Args: []string{"docker", "run", "--annotation=a=b", "x"},
				Notes: []string{
					"the plugin gave no CDI names and no device nodes, so docker gives the container no device by itself",
				},
			},
			"",
		},
		"two shares of a GPU and a MIG device are two devices": {
			"train {count}", leased,
			[]string{"GPU-1::0", "GPU-1::3", "MIG-2"},
			Plan{Args: []string{"train", "2"}, Env: []string{"CUDA_VISIBLE_DEVICES=GPU-1,MIG-2"}, Bare: true},
			"",
		},
		"no device": {
			"train",
			model.RunOptions{},
			nil,
			Plan{Args: []string{"train"}, Env: []string{"CUDA_VISIBLE_DEVICES="}, Bare: true},
			"",
		},
		"{cdi} without CDI names": {
			"x {cdi}", devices, nil, Plan{}, `argument "{cdi}": the plugin gave no CDI names for {cdi}`,
		},
		"another device of the leased kind": {
			"podman run --device vendor.com/nic=2 x", nic, nil, Plan{}, "podman --device=vendor.com/nic=2: the container",
		},
		"an ID with a comma": {
			"train", leased, []string{"a,b"}, Plan{}, `device ID "a,b": it cannot be passed to a command`,
		},
		"an ID with a line break": {"train", leased, []string{"a\n"}, Plan{}, "device ID"},
		"an ID like an option":    {"train {uuids}", leased, []string{"--x"}, Plan{}, "device ID"},
		"an ID without a UUID":    {"train", leased, []string{"::1"}, Plan{}, "device ID"},
		"run options are not valid": {
			"train",
			model.RunOptions{CDIDevices: []string{"--privileged"}},
			nil,
			Plan{},
			`run options of the devices: CDI name "--privileged"`,
		},
		"run options that an engine cannot take": {
			"docker run x",
			model.RunOptions{Mounts: []model.Mount{{ContainerPath: "/a,b", HostPath: "/c"}}},
			nil,
			Plan{},
			"cannot be passed to a container engine",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := For(strings.Split(c.command, " "), Lease{RunOptions: c.options, IDs: c.ids})
			if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
				t.Errorf("%v, want %q", err, c.err)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestForByIndex(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		command string
		lease   Lease
		want    string // variables, with a blank between them
		note    string // a part of the only note; empty means none
		err     string // a part of it; empty means none
	}{
		"a confined command counts from 0": {
			command: "train", lease: Lease{IDs: leasedIDs, HostIndexes: []string{"5", "3"}, Confined: true},
			want: "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0,1",
		},
		"any other counts like the host": {
			command: "train", lease: Lease{IDs: leasedIDs, HostIndexes: []string{"5", "3"}},
			want: "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=5,3",
		},
		"so does a container that has all GPUs": {
			command: "apptainer run x", lease: Lease{IDs: leasedIDs, HostIndexes: []string{"5", "3"}},
			want: "APPTAINERENV_CUDA_DEVICE_ORDER=PCI_BUS_ID APPTAINERENV_CUDA_VISIBLE_DEVICES=5,3",
			note: "apptainer gives the container all GPUs of the host",
		},
		"a container that has its own GPUs only needs no variable": {
			command: "podman run x", lease: Lease{RunOptions: leased, IDs: leasedIDs, HostIndexes: []string{"5", "3"}},
		},
		"two shares of a GPU have one index": {
			command: "train", lease: Lease{IDs: []string{"GPU-1::0", "GPU-1::3"}, HostIndexes: []string{"5", "5"}},
			want: "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=5",
		},
		"and one in a confined command": {
			command: "train", lease: Lease{IDs: []string{"GPU-1::0", "GPU-1::3"}, Confined: true},
			want: "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0",
		},
		"MIG devices have UUIDs": {
			command: "train", lease: Lease{IDs: []string{"MIG-1"}, HostIndexes: []string{"0:1"}},
			want: "CUDA_VISIBLE_DEVICES=MIG-1", note: "MIG devices have no index",
		},
		"also in a confined command": {
			command: "train", lease: Lease{IDs: []string{"MIG-1"}, HostIndexes: []string{"0:1"}, Confined: true},
			want: "CUDA_VISIBLE_DEVICES=MIG-1", note: "MIG devices have no index",
		},
		"an index that is not known": {
			command: "train", lease: Lease{IDs: leasedIDs, HostIndexes: []string{"5", ""}},
			err: `the index of device "GPU-2" on this host is not known: leave out --ids index`,
		},
		"an index that is no number": {
			command: "apptainer run x", lease: Lease{IDs: leasedIDs, HostIndexes: []string{"-1", "0"}},
			err: `the index of device "GPU-1" on this host is not known`,
		},
		"an earlier manager that gives no indexes": {
			command: "train", lease: Lease{IDs: leasedIDs}, err: `the index of device "GPU-1" on this host is not known`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c.lease.ByIndex = true
			p, err := For(strings.Split(c.command, " "), c.lease)
			if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
				t.Errorf("%v, want %q", err, c.err)
			}
			if got := strings.Join(p.Env, " "); got != c.want {
				t.Errorf("got %s, want %s", got, c.want)
			}
			notes := strings.Join(p.Notes, "\n")
			if (notes == "") != (c.note == "") || !strings.Contains(notes, c.note) || len(p.Notes) > 1 {
				t.Errorf("notes are %q, want %q", notes, c.note)
			}
		})
	}
}

func TestEnviron(t *testing.T) {
	t.Parallel()
	const replaced = `CUDA_VISIBLE_DEVICES="0,1" of this environment is replaced by "GPU-1,GPU-2" of the lease`
	for name, c := range map[string]struct{ own, inherited, want, notes []string }{
		"variables of the caller stay": {
			own: []string{uuids}, inherited: []string{"CUDA=1", "CUDA_VISIBLE_DEVICES_X=1"},
			want: []string{"CUDA=1", "CUDA_VISIBLE_DEVICES_X=1", uuids},
		},
		"devices that the caller has chosen are replaced": {
			own: []string{uuids}, inherited: []string{"A=1", "CUDA_VISIBLE_DEVICES=0,1", "B=2"},
			want: []string{"A=1", "B=2", uuids}, notes: []string{replaced},
		},
		"each variable is replaced": {
			own:       []string{busOrder, "CUDA_VISIBLE_DEVICES=0"},
			inherited: []string{"CUDA_DEVICE_ORDER=FASTEST_FIRST", "CUDA_VISIBLE_DEVICES="},
			want:      []string{busOrder, "CUDA_VISIBLE_DEVICES=0"},
			notes: []string{
				`CUDA_DEVICE_ORDER="FASTEST_FIRST" of this environment is replaced by "PCI_BUS_ID" of the lease`,
				`CUDA_VISIBLE_DEVICES="" of this environment is replaced by "0" of the lease`,
			},
		},
		"the same value is no news": {
			own: []string{uuids}, inherited: []string{uuids}, want: []string{uuids},
		},
		"a variable is replaced in a container of Apptainer": {
			own: []string{"APPTAINERENV_" + uuids}, inherited: []string{"CUDA_VISIBLE_DEVICES=0,1"},
			want: []string{"CUDA_VISIBLE_DEVICES=0,1", "APPTAINERENV_" + uuids}, notes: []string{replaced},
		},
		"a control character is quoted": {
			own: []string{uuids}, inherited: []string{"CUDA_VISIBLE_DEVICES=\x1b[2J"}, want: []string{uuids},
			notes: []string{
				`CUDA_VISIBLE_DEVICES="\x1b[2J" of this environment is replaced by "GPU-1,GPU-2" of the lease`,
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			before := slices.Clone(c.inherited)
			env, notes := Plan{Env: c.own}.Environ(c.inherited)
			if diff := cmp.Diff([][]string{c.want, c.notes}, [][]string{env, notes}); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
			if !slices.Equal(before, c.inherited) {
				t.Error("the caller's environment was changed")
			}
		})
	}
}

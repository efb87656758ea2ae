package main

import (
	"context"
	"errors"
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/demo"
	"gpu-cdi-plugin/internal/exit"
)

// kit is what the demo gives to its containers.
type kit struct {
	// names are the CDI names of the devices, and uuids what nvidia-smi -L must then list.
	names, uuids []string
	// smi is the path of nvidia-smi in the container; files are the driver's files on the host that must find the
	// libraries they need in the root file system.
	smi   string
	files []string
}

// devicesShown is how many GPUs the demo's containers get.
const devicesShown = 2

// pack chooses the first devices that a container can be given.
func pack(g *generated, kind string) (kit, error) {
	var k kit
	for _, m := range g.spec.ContainerEdits.Mounts {
		base := path.Base(m.ContainerPath)
		if base == "nvidia-smi" {
			k.smi = m.ContainerPath
		}
		if base == "nvidia-smi" || strings.HasPrefix(base, "libnvidia-ml.so") {
			k.files = append(k.files, m.HostPath)
		}
	}
	if k.smi == "" {
		return kit{}, exit.With(exit.NoDriver, "gpu-cdi-plugin cdi generate --explain tells where it was looked for",
			errors.New("this driver has no nvidia-smi, which the demo runs"))
	}
	for i := range g.snapshot.Devices {
		k.add(&g.snapshot.Devices[i], kind)
	}
	return k, nil
}

// add adds a GPU, or the MIG devices of one in MIG mode, while there is room.
func (k *kit) add(d *gpu.Device, kind string) {
	if !d.Usable() {
		return
	}
	if !d.MIGEnabled && len(k.names) < devicesShown {
		k.names = append(k.names, kind+"="+strconv.Itoa(d.Index))
		k.uuids = append(k.uuids, d.UUID)
	}
	for i := range d.MIG {
		if len(k.names) == devicesShown {
			return
		}
		k.names = append(k.names, fmt.Sprintf("%s=%d:%d", kind, d.Index, d.MIG[i].Index))
		k.uuids = append(k.uuids, d.MIG[i].UUID)
		if !slices.Contains(k.uuids, d.UUID) {
			k.uuids = append(k.uuids, d.UUID) // nvidia-smi lists a MIG device under its GPU
		}
	}
}

// rootfs makes a root file system in dir in which the driver's nvidia-smi can run, and a shell to look around.
func (k *kit) rootfs(dir string) (string, error) {
	root, err := demo.NewRoot(dir)
	if err != nil {
		return "", err
	}
	for _, file := range k.files {
		if err := root.AddNeeds(file); err != nil {
			return "", err
		}
	}
	what := "a C library"
	if box := demo.Find("busybox"); box != "" {
		err := errors.Join(root.Copy(box, "/bin/busybox"), root.AddNeeds(box), root.Link("busybox", "/bin/sh"))
		if err != nil {
			return "", err
		}
		what += " and busybox"
	}
	return fmt.Sprintf("%s of this host, %.1f MB", what, float64(root.Size())/1e6), nil
}

// makeBundle makes a bundle and puts the devices into its config.json, for a runtime that knows nothing of CDI.
func (s *show) makeBundle() error {
	bundle := s.bundle()
	err := s.steps.Do("root", func() (string, error) { return s.kit.rootfs(filepath.Join(bundle, "rootfs")) })
	if err != nil {
		return err
	}
	return s.steps.Do("inject", func() (string, error) {
		if err := demo.WriteBundle(bundle, []string{s.kit.smi, "-L"}); err != nil {
			return "", err
		}
		_, err := cdi.Inject(bundle, s.kit.names, s.specDirs(s.host)...)
		return "cdi inject --bundle " + bundle + " " + strings.Join(s.kit.names, " "), err
	})
}

func (s *show) bundle() string { return filepath.Join(s.dir, "bundle") }

// runContainers runs what engines there are.
func (s *show) runContainers(ctx context.Context) error {
	runtime, podman := demo.Find("runc", "crun"), demo.Find("podman")
	if runtime == "" {
		s.skip("runc", "neither runc nor crun is installed")
	} else if err := s.runBundle(ctx, runtime); err != nil {
		return err
	}
	if podman == "" || runtime == "" {
		s.skip("podman", "podman is not installed, or no runtime for it")
		return nil
	}
	return s.runPodman(ctx, podman, runtime)
}

// runBundle shows a bare OCI runtime.
func (s *show) runBundle(ctx context.Context, runtime string) error {
	r := &demo.Runtime{Path: runtime, State: filepath.Join(s.dir, "runtime")}
	return s.container(filepath.Base(runtime), "run --bundle "+s.bundle()+": nvidia-smi -L", func() (string, error) {
		return r.Run(ctx, s.bundle())
	})
}

// runPodman shows an engine that knows CDI.
func (s *show) runPodman(ctx context.Context, podman, runtime string) error {
	root := filepath.Join(s.dir, "rootfs")
	if err := s.steps.Do("root", func() (string, error) { return s.kit.rootfs(root) }); err != nil {
		return err
	}
	p := &demo.Podman{Path: podman, Runtime: runtime, Dir: s.dir, CDIDir: s.CDIDir}
	what := "run --device " + strings.Join(s.kit.names, " --device ") + ": nvidia-smi -L"
	return s.container("podman", what, func() (string, error) {
		return p.Run(ctx, root, s.kit.names, []string{s.kit.smi, "-L"})
	})
}

// container runs nvidia-smi -L in a container, shows what it prints, and checks it.
func (s *show) container(engine, what string, start func() (string, error)) error {
	var out string
	err := s.steps.Do(engine, func() (_ string, err error) {
		out, err = start()
		return what, err
	})
	s.steps.Show(out)
	if err != nil {
		return fmt.Errorf("%s: %w", engine, err)
	}
	if err := demo.Check(out, s.kit.uuids); err != nil {
		return fmt.Errorf("%s: %w", engine, err)
	}
	return nil
}

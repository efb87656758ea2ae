package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/demo"
	"gpu-cdi-plugin/internal/exit"
	"gpu-cdi-plugin/internal/host"
)

// defaultMachine is what the demo simulates on a machine without a GPU.
const defaultMachine = "dgx-h100"

// demoOptions are the options of demo.
type demoOptions struct {
	// Machine is the machine to simulate, a name or a file; empty is the real driver or else defaultMachine.
	Machine string
	// Keep leaves the demo's directory for who wants to look around.
	Keep bool
}

func (a *app) demoCommand() *cobra.Command {
	var opts demoOptions
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Show GPUs arriving in containers, on real GPUs or simulated ones",
		Long: `Writes a CDI spec into a temporary directory, gives two GPUs to a container of runc (or crun) and to one of podman, runs
nvidia-smi -L in each, and checks that it lists exactly those two.

The GPUs are this host's if its NVIDIA driver is loaded. Otherwise, or with --machine, gpu-sim simulates a machine: the
files of a driver, with a library that answers as the real one would. The containers' root file system is made of this
host's own files. Nothing is left behind, and the host's CDI directories stay as they are. It needs root, and it says
what of runc and podman is missing. From a source tree, and for a simulated machine, which is made under /tmp, it needs
--insecure-paths too.`,
		Example: `  gpu-cdi-plugin demo
  gpu-cdi-plugin demo --machine mig-h100 --insecure-paths
  gpu-cdi-plugin demo --machine ./my-machine.yaml --keep --insecure-paths`,
		Annotations: cli.Statuses(exit.OK, exit.Failure, exit.Usage, exit.Partial, exit.NoDriver, exit.NoGPU,
			exit.Interrupted),
		Args:              noArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(cmd *cobra.Command, _ []string) error { return a.demo(cmd.Context(), opts) },
	}
	cmd.Flags().StringVar(&opts.Machine, "machine", "", "simulate this machine, a `name or file` as for gpu-sim")
	cmd.Flags().BoolVar(&opts.Keep, "keep", false, "keep the demo's directory")
	_ = cmd.RegisterFlagCompletionFunc("machine", completeMachines)
	return cmd
}

// completeMachines knows those machines that gpu-sim comes with, if it is there, and files.
func completeMachines(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	names, _ := demo.FindSimulator().Machines(cmd.Context())
	return names, cobra.ShellCompDirectiveDefault
}

// show is one run of the demo.
type show struct {
	*app  // with the options that point to the node
	steps *demo.Steps
	dir   string
	host  host.Host

	simulator demo.Simulator
	// simulated tells that the node is not a real one.
	simulated bool
	// missing is what could not be done, and what it would take.
	missing []string

	spec *generated
	kit  kit
}

func (a *app) demo(ctx context.Context, opts demoOptions) (err error) {
	simulator := demo.FindSimulator()
	if opts.Machine != "" { // what is wrong with it is said before anything is done
		if _, err := simulator.Machines(ctx, opts.Machine); err != nil {
			return err
		}
	}
	dir, err := demo.MakeDir()
	if err != nil {
		return err
	}
	own := *a // the demo's spec directory, and maybe its node, are not those of the other verbs
	s := &show{app: &own, steps: demo.NewSteps(a.stdout), dir: dir, simulator: simulator}
	// Who reads what is printed may go away, as head does. This must not end the demo before it has cleaned up.
	pipe := make(chan os.Signal, 1)
	signal.Notify(pipe, syscall.SIGPIPE)
	defer signal.Stop(pipe)
	defer func() { err = cmp.Or(errors.Join(err, s.cleanUp(opts.Keep)), s.steps.Err()) }()
	if err := s.play(ctx, opts.Machine); err != nil {
		return err
	}
	if len(s.missing) > 0 {
		hint := "on Debian, scripts/setup installs what is needed, as root"
		if !isRoot() {
			hint = "run it as root"
		}
		return partly(hint, "not shown: %s", strings.Join(s.missing, "; "))
	}
	s.steps.Say("done: each container saw exactly what it was given, %s, in %.1f s",
		strings.Join(s.kit.names, " and "), s.steps.Elapsed().Seconds())
	return nil
}

func (s *show) play(ctx context.Context, machine string) error {
	if err := s.chooseNode(ctx, machine); err != nil {
		return err
	}
	if s.simulated && !isRoot() {
		if err := s.steps.Do("devices", func() (string, error) { return s.countDevices(ctx) }); err != nil {
			return err
		}
		s.skip("containers", "device nodes and containers need root")
		return nil
	}
	if err := s.steps.Do("spec", func() (string, error) { return s.writeSpec(ctx) }); err != nil {
		return err
	}
	if err := s.makeBundle(); err != nil {
		return err
	}
	if !isRoot() {
		s.skip("containers", "containers with devices need root")
		return nil
	}
	return s.runContainers(ctx)
}

func isRoot() bool { return os.Geteuid() == 0 }

func (s *show) skip(name, reason string) {
	s.steps.Skip(name, reason)
	s.missing = append(s.missing, name+" ("+reason+")")
}

// chooseNode settles on the real driver or makes a simulated node, and says which. A machine is simulated in any case.
func (s *show) chooseNode(ctx context.Context, machine string) (err error) {
	if s.host, err = s.app.host(); err != nil {
		return err
	}
	s.CDIDir = filepath.Join(s.dir, "cdi")
	if err := os.Mkdir(s.CDIDir, 0o755); err != nil {
		return fmt.Errorf("make the demo's spec directory: %w", err)
	}
	return s.steps.Do("node", func() (string, error) {
		if machine != "" {
			return s.simulate(ctx, machine, "since --machine asks for it")
		}
		// The file is the kernel module's, so it is there only while the driver is loaded.
		if _, err := os.Stat(s.host.Proc("driver/nvidia/version")); err == nil {
			return s.present(ctx), nil
		}
		return s.simulate(ctx, defaultMachine, "since no NVIDIA driver is loaded here")
	})
}

// present says whose driver it is that is there. With --root it can be that of a node of gpu-sim.
func (s *show) present(ctx context.Context) string {
	if s.host.Root() == "/" {
		return "REAL: the NVIDIA driver of this host"
	}
	node, err := s.simulator.Show(ctx, s.host.Root())
	if err != nil {
		return "REAL: the NVIDIA driver of the host under " + s.host.Root()
	}
	s.simulated = true
	return fmt.Sprintf("SIMULATED: %s, since it is what is in %s", node.Machine, s.host.Root())
}

func (s *show) simulate(ctx context.Context, nameOrFile, why string) (string, error) {
	dir := filepath.Join(s.dir, "node")
	node, err := s.simulator.Create(ctx, dir, nameOrFile)
	if err != nil {
		return "", err
	}
	s.simulated = true
	s.Root, s.DriverRoot, s.DevRoot, s.NVMLLibrary = dir, "", "", ""
	s.host, err = s.app.host()
	return fmt.Sprintf("SIMULATED: %s, %s, %s", node.Machine, plural(len(node.Devices), "GPU"), why), err
}

// countDevices asks the driver, which is all that can be shown of simulated GPUs without device nodes.
func (s *show) countDevices(ctx context.Context) (string, error) {
	snapshot, err := s.readDevices(ctx, s.host)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("driver %s answers for %s", snapshot.DriverVersion, plural(len(snapshot.Devices), "GPU")), nil
}

func (s *show) writeSpec(ctx context.Context) (result string, err error) {
	if err := s.checkHook(); err != nil {
		return "", err
	}
	if s.spec, err = s.generate(ctx, s.host, driver.All); err != nil {
		return "", err
	}
	if err := s.spec.noDevice(s.host); err != nil {
		return "", err
	}
	if s.kit, err = pack(s.spec, s.CDIKind); err != nil {
		return "", err
	}
	version := s.spec.snapshot.DriverVersion
	return fmt.Sprintf("driver %s, %s", version, plural(len(s.spec.spec.Devices), "CDI device")),
		cdi.WriteFile(s.ownSpec(), s.spec.spec)
}

// cleanUp removes what the demo made.
func (s *show) cleanUp(keep bool) error {
	if keep {
		s.steps.Say("kept: %s", s.dir)
		return nil
	}
	return s.steps.Do("clean up", func() (string, error) {
		if err := os.RemoveAll(s.dir); err != nil {
			return "", fmt.Errorf("remove the demo's directory: %w", err)
		}
		return "removed " + s.dir, nil
	})
}

package main

import (
	"bytes"
	"cmp"
	"context"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// served is a plugin that serves a simulated node, in a process of its own as on a real node, and a kubelet.
type served struct {
	t       *testing.T
	node    *sim.Node
	kubelet *kubelettest.Kubelet
	dir     string
	spec    string
	config  string // the file of --config
	log     *testenv.Log
	watch   io.Writer // gets the log too; optional
	process *os.Process
	done    chan error
}

// newServed makes a node and a kubelet. The plugin is started by start.
func newServed(t *testing.T, machine, config string, options ...simtest.Option) *served {
	t.Helper()
	dir := t.TempDir()
	s := &served{
		t: t, node: simtest.Node(t, machine, options...), kubelet: kubelettest.New(t), dir: dir, log: &testenv.Log{},
		spec:   filepath.Join(dir, "cdi", cdi.FileName(cdi.DefaultKind)),
		config: filepath.Join(dir, "config.yaml"),
	}
	s.configure(config)
	s.kubelet.Start()
	return s
}

func (s *served) configure(text string) {
	s.t.Helper()
	testenv.Must(s.t, os.WriteFile(s.config, []byte(text), 0o644))
}

// start starts serve. It ends with the test.
func (s *served) start(env ...string) {
	s.t.Helper()
	s.startVerb(env, "serve", "--device-plugin-dir", s.kubelet.Dir,
		"--runtime-dir", s.runtimeDir(), "--state-dir", filepath.Join(s.dir, "state"))
}

func (s *served) runtimeDir() string { return filepath.Join(s.dir, "run") }

func (s *served) startVerb(env []string, args ...string) {
	s.t.Helper()
	exe, err := os.Executable()
	testenv.Must(s.t, err)
	cmd := exec.Command(exe)
	cmd.Args = append([]string{
		"gpu-cdi-plugin", "--root", s.node.Root(), "--cdi-dir", filepath.Dir(s.spec), "--config", s.config,
		"--hook-path", "/bin/true",
	}, args...)
	cmd.Env = append(append(os.Environ(), insecure), env...)
	cmd.Stderr = io.MultiWriter(s.log, s.t.Output(), cmp.Or[io.Writer](s.watch, io.Discard))
	testenv.Must(s.t, cmd.Start())
	done := make(chan error, 1)
	go func() {
		done <- cmd.Wait()
		close(done)
	}()
	s.process, s.done = cmd.Process, done
	s.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		if err, running := <-done; running {
			s.t.Logf("killed: %v", err)
		}
	})
}

// end sends a signal that ends the process, and returns what it ends with. The kubelet has no device of it then.
func (s *served) end(sig os.Signal) error {
	s.t.Helper()
	s.signal(sig)
	err := s.ended()
	for _, resource := range s.kubelet.Resources() {
		s.kubelet.WaitGone(resource)
	}
	return err
}

// ended waits for the end of the process and returns its error.
func (s *served) ended() error {
	s.t.Helper()
	select {
	case err := <-s.done:
		return err
	case <-time.After(time.Minute):
		s.t.Fatal("the plugin goes on")
		return nil
	}
}

func (s *served) signal(sig os.Signal) {
	s.t.Helper()
	testenv.Must(s.t, s.process.Signal(sig))
}

const gpuResource = "nvidia.com/gpu"

// allocate asks for devices and returns the CDI names.
func (s *served) allocate(e *kubelettest.Endpoint, ids ...string) []string {
	s.t.Helper()
	names, err := s.tryAllocate(e, ids...)
	testenv.Must(s.t, err)
	return names
}

func (s *served) tryAllocate(e *kubelettest.Endpoint, ids ...string) ([]string, error) {
	ctx, cancel := context.WithTimeout(s.t.Context(), prompt)
	defer cancel()
	answer, err := e.Client.Allocate(ctx, &v1beta1.AllocateRequest{
		ContainerRequests: []*v1beta1.ContainerAllocateRequest{{DevicesIds: ids}},
	})
	if err != nil {
		return nil, err
	}
	var names []string
	for _, d := range answer.GetContainerResponses()[0].GetCdiDevices() {
		names = append(names, d.GetName())
	}
	return names, nil
}

// offered expects engines to find the names in the spec.
func (s *served) offered(names ...string) {
	s.t.Helper()
	all := cdi.Load(filepath.Dir(s.spec)).Names()
	for _, name := range names {
		if !slices.Contains(all, name) {
			s.t.Errorf("%s is in no spec", name)
		}
	}
}

var waitFor = testenv.Eventually

func TestServe(t *testing.T) {
	t.Parallel()
	s := newServed(t, "dgx-h100", "")
	s.start()
	e := s.kubelet.WaitListed(gpuResource, 8, 0)
	a, b := s.node.Machine().GPUs[2].UUID, s.node.Machine().GPUs[5].UUID
	names := s.allocate(e, a, b)
	if want := []string{cdi.DefaultKind + "=" + a, cdi.DefaultKind + "=" + b}; !slices.Equal(names, want) {
		t.Errorf("allocated %v, want %v", names, want)
	}
	s.offered(names...)

	// A kubelet that starts again has the devices again, from the same process.
	s.kubelet.Restart()
	s.kubelet.WaitListed(gpuResource, 8, 0)

	if err := s.end(syscall.SIGTERM); err != nil {
		t.Errorf("after SIGTERM: %v", err)
	}
	s.offered(names...) // running containers may start again
	left, err := os.ReadDir(s.kubelet.Dir)
	testenv.Must(t, err)
	for _, f := range left {
		if f.Name() != kubelettest.Socket {
			t.Errorf("it left %s", f.Name())
		}
	}

	// One that was killed left its socket and its lock, and is followed by another.
	s.start()
	s.kubelet.WaitListed(gpuResource, 8, 0)
	if err := s.end(syscall.SIGKILL); err == nil {
		t.Error("it was killed and ended well")
	}
	s.start()
	s.kubelet.WaitListed(gpuResource, 8, 0)
}

func TestServeFollowsTheNode(t *testing.T) {
	t.Parallel()
	s := newServed(t, "dgx-h100", "mig-strategy: mixed")
	s.start()
	s.kubelet.WaitListed(gpuResource, 8, 0)

	// MIG is reconfigured, without a signal or a restart.
	testenv.Must(t, s.node.SetMIG(4, []string{"3g.40gb", "1g.10gb", "1g.10gb"}))
	s.kubelet.WaitListed(gpuResource, 7, 0)
	small := s.kubelet.WaitListed("nvidia.com/mig-1g.10gb", 2, 0)
	s.kubelet.WaitListed("nvidia.com/mig-3g.40gb", 1, 0)
	s.offered(s.allocate(small, s.kubelet.Devices("nvidia.com/mig-1g.10gb")[1].GetID())...)
	testenv.Must(t, s.node.SetMIG(4, []string{"1g.10gb"}))
	s.kubelet.WaitListed("nvidia.com/mig-1g.10gb", 1, 0)
	s.kubelet.WaitListed("nvidia.com/mig-3g.40gb", 0, 0)
	testenv.Must(t, s.node.DisableMIG(4))
	s.kubelet.WaitListed(gpuResource, 8, 0)
	s.kubelet.WaitListed("nvidia.com/mig-1g.10gb", 0, 0)

	// A GPU falls off the bus, and comes back. SIGHUP has the node reconciled now instead of within 30 seconds.
	testenv.Must(t, s.node.Lose(3))
	s.signal(syscall.SIGHUP)
	e := s.kubelet.WaitListed(gpuResource, 7, 1)
	s.offered(s.allocate(e, s.node.Machine().GPUs[0].UUID)...)
	testenv.Must(t, s.node.ClearGPU(3))
	s.signal(syscall.SIGHUP)
	s.kubelet.WaitListed(gpuResource, 8, 0)

	// A GPU is gone.
	testenv.Must(t, s.node.Unplug(7))
	s.signal(syscall.SIGHUP)
	s.kubelet.WaitListed(gpuResource, 7, 0)
	waitFor(t, "a spec without it", func() bool {
		return !slices.Contains(cdi.Load(filepath.Dir(s.spec)).Names(), cdi.DefaultKind+"=7")
	})

	// The spec is deleted.
	testenv.Must(t, os.Remove(s.spec))
	waitFor(t, "a new spec", func() bool { _, err := os.Stat(s.spec); return err == nil })
}

func TestServeRestartsWithAnotherDriver(t *testing.T) {
	t.Parallel()
	s := newServed(t, "pcie-quad", "")
	s.start()
	s.kubelet.WaitListed(gpuResource, 4, 0)
	_, err := sim.Create(t.Context(), s.node.Root(), s.node.Machine(), sim.Options{Driver: "590.44.01", Force: true})
	testenv.Must(t, err)
	waitFor(t, "a spec of the new driver", func() bool {
		data, err := os.ReadFile(s.spec)
		return err == nil && bytes.Contains(data, []byte("590.44.01")) &&
			!bytes.Contains(data, []byte(sim.DefaultDriver))
	})
	s.offered(s.allocate(s.kubelet.WaitListed(gpuResource, 4, 0), s.node.Machine().GPUs[0].UUID)...)
	if log := s.log.String(); !strings.Contains(
		log,
		"the NVIDIA driver was replaced: its libraries now have version 590.44.01",
	) {
		t.Errorf("the log does not have the reason of the restart")
	}
	if err := s.end(syscall.SIGTERM); err != nil { // it is the same process
		t.Error(err)
	}
}

func TestServeReadsItsConfigurationAgain(t *testing.T) {
	t.Parallel()
	s := newServed(t, "pcie-quad", "")
	s.start()
	e := s.kubelet.WaitListed(gpuResource, 4, 0)
	total := s.kubelet.Registrations()

	s.configure("sharing: {time-slicing: {resources: [{name: nvidia.com/gpu, devices: [0], replicas: 3}]}}")
	s.signal(syscall.SIGHUP)
	s.kubelet.WaitListed(gpuResource, 6, 0)
	if got := s.kubelet.Registrations(); got != total {
		t.Errorf("%d registrations for a new list, want none", got-total)
	}

	// How devices are prepared also changes at once.
	s.leftOver(1)
	const shared = "\nsharing: {time-slicing: {resources: [{name: nvidia.com/gpu, devices: [0], replicas: 3}]}}"
	for _, policy := range []string{"clean", "check", "clean"} { // check refuses only what it can see: no processes here
		s.configure("prestart: {policy: " + policy + "}" + shared)
		s.signal(syscall.SIGHUP)
		waitFor(t, "policy "+policy, func() bool { return (s.preStart(e, s.uuids()[1]) == "") == (policy == "check") })
	}
	if got := s.kubelet.Registrations(); got != total {
		t.Errorf("%d registrations for another policy, want none", got-total)
	}

	// A change of something else than rules makes the service restart.
	s.configure("strategy: [envvar]")
	s.signal(syscall.SIGHUP)
	s.kubelet.WaitRegistrations(total + 1)
	e = s.kubelet.WaitListed(gpuResource, 4, 0)
	if names := s.allocate(e, s.node.Machine().GPUs[0].UUID); len(names) > 0 {
		t.Errorf("CDI names %v with the strategy envvar", names)
	}
}

func TestServeTellsSystemd(t *testing.T) {
	t.Parallel()
	socket, until := testenv.Systemd(t)
	s := newServed(t, "pcie-quad", "")
	s.start("NOTIFY_SOCKET="+socket, "WATCHDOG_USEC=200000")
	// The kubelet may connect before it is ready or after.
	for text := until("READY=1\nSTATUS="); strings.Contains(text, "not connected"); {
		text = until("STATUS=nvidia.com/gpu: 4 of 4 devices healthy")
	}
	until("WATCHDOG=1")
	s.kubelet.WaitListed(gpuResource, 4, 0)
	s.kubelet.Stop()
	until("STATUS=nvidia.com/gpu: 4 of 4 devices healthy, not connected to the kubelet")
	s.signal(syscall.SIGHUP)
	until("RELOADING=1\nMONOTONIC_USEC=")
	until("READY=1")
	if err := s.end(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
	until("STOPPING=1")
}

func TestServeAnswersForItsHealth(t *testing.T) {
	t.Parallel()
	s := newServed(t, "pcie-quad", "listen: 127.0.0.1:0")
	s.start()
	s.allocate(s.kubelet.WaitListed(gpuResource, 4, 0), s.node.Machine().GPUs[0].UUID)
	// The kubelet can have the list, and allocate, before the plugin has noticed that it is watched.
	waitFor(t, "readiness", func() bool { _, status := s.ask("/readyz"); return status == http.StatusOK })
	if body, status := s.ask("/healthz"); status != http.StatusOK {
		t.Errorf("/healthz: %d %s", status, body)
	}
	for _, line := range []string{
		`gpu_cdi_plugin_devices{health="healthy",resource="nvidia.com/gpu"} 4`,
		`gpu_cdi_plugin_allocations_total{resource="nvidia.com/gpu",result="OK"} 1`,
		`gpu_cdi_plugin_registrations_total{resource="nvidia.com/gpu",result="success"} 1`,
		`gpu_cdi_plugin_spec_stale 0`,
	} {
		// The kubelet watches the devices before its answer to the registration arrives.
		waitFor(t, line, func() bool { body, _ := s.ask("/metrics"); return strings.Contains(body, line+"\n") })
	}
	s.kubelet.Stop()
	waitFor(t, "the end of readiness", func() bool {
		body, status := s.ask("/readyz")
		return status == http.StatusServiceUnavailable &&
			strings.Contains(body, "the kubelet does not watch nvidia.com/gpu: ")
	})
}

// Without the option the metrics have no names of pods.
func TestServeNamesTheHoldersOfDevices(t *testing.T) {
	t.Parallel()
	for option, named := range map[string]bool{"": false, "pod-metrics: true": true} {
		t.Run(option, func(t *testing.T) {
			t.Parallel()
			s := newServed(t, "pcie-quad", "listen: 127.0.0.1:0\n"+option)
			s.kubelet.Pods.Set(kubelettest.Pod("ml", "train", "main", gpuResource, s.uuids()[1]))
			s.start()
			s.kubelet.WaitListed(gpuResource, 4, 0)
			s.rounds(s.kubelet.Pods, 1)
			line := `gpu_cdi_plugin_device_held{container="main",dra_claim_name="",namespace="ml",pod="train",` +
				`resource="nvidia.com/gpu",uuid="` + s.uuids()[1] + `"} 1`
			if !named {
				if body, _ := s.ask("/metrics"); strings.Contains(body, "train") {
					t.Errorf("metrics:\n%s", body)
				}
				return
			}
			waitFor(t, line, func() bool { body, _ := s.ask("/metrics"); return strings.Contains(body, line+"\n") })
			s.kubelet.Pods.Set()
			waitFor(t, "the end of the pod", func() bool {
				body, _ := s.ask("/metrics")
				return !strings.Contains(body, "train")
			})
		})
	}
}

// A SIGHUP while the configuration is read for the first time has it read again. It does not end the process.
func TestServeHandlesSIGHUPDuringStart(t *testing.T) {
	t.Parallel()
	s := newServed(t, "workstation", "")
	testenv.Must(t, os.Remove(s.config))
	testenv.Must(t, syscall.Mkfifo(s.config, 0o600))
	s.start()
	for range 2 { // the second time it is read because of the signal
		pipe, err := os.OpenFile(s.config, os.O_WRONLY, 0) // which waits for the reader
		testenv.Must(t, err)
		if s.kubelet.Registrations() == 0 {
			s.signal(syscall.SIGHUP)
		}
		_, err = pipe.WriteString("{}\n")
		testenv.Must(t, err)
		testenv.Must(t, pipe.Close())
		s.kubelet.WaitListed(gpuResource, 1, 0)
	}
	if err := s.end(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
}

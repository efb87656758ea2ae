package bench

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/plugin/plugintest"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/proc"
)

// gpus is the resource that the plugin serves on a DGX H100, and count how many there are.
const (
	gpus  = "nvidia.com/gpu"
	count = 8
)

// BenchmarkServe is P3 of the targets for the whole process: from its start until the kubelet has the list of eight GPUs.
// The CDI spec is written every time. The floor is a Go program that opens the driver's library and ends.
func BenchmarkServe(b *testing.B) {
	node := simtest.Node(b, "dgx-h100")
	s := newServing(b, node)
	least := &variant{name: "a Go program that opens NVML", cmd: proc.Cmd{Args: floor(b, node)}}
	our := &variant{name: "gpu-cdi-plugin serve, until it is registered", run: s.start, prepare: func() error {
		s.end()
		return os.RemoveAll(s.cdi)
	}}
	for b.Loop() {
		measure(b, rounds, []*variant{least, our})
	}
	logTable(b, "start to registered, dgx-h100", []*variant{least, our})
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(ms(our.median()), "ms")
	b.ReportMetric(ms(least.median()), "floor-ms")
	b.ReportMetric(float64(our.median())/float64(least.median()), "x-floor")
}

// BenchmarkMemory is P5 of the targets: what the plugin holds two seconds after it was registered and each GPU allocated.
// Of the resident memory, what is mapped from files (the program itself, libraries) is there once for all processes and
// can be dropped at any time; the rest is the process's own. The floor is a Go program that has opened the driver's library.
func BenchmarkMemory(b *testing.B) {
	const settled = 2 * time.Second
	node := simtest.Node(b, "dgx-h100")
	s := newServing(b, node)
	least, end := waiting(b, floor(b, node))
	defer end()
	for b.Loop() {
		s.start()
		for i := range count {
			s.allocate(i)
		}
		time.Sleep(settled)
	}
	own, files := resident(b, s.process.Pid())
	floorOwn, floorFiles := resident(b, least.Pid())
	size, err := os.Stat(s.program)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(own, "own-MB")
	b.ReportMetric(files, "file-MB")
	b.ReportMetric(own+files, "resident-MB")
	b.ReportMetric((own+files)/(floorOwn+floorFiles), "x-floor")
	b.ReportMetric(float64(size.Size())/1e6, "binary-MB")
}

// serving is a plugin in a process of its own, and its kubelet.
type serving struct {
	b       *testing.B
	program string
	args    []string
	cdi     string
	log     *os.File
	kubelet *plugintest.Kubelet
	process *proc.Process
	list    []*v1beta1.Device
	client  v1beta1.DevicePluginClient
}

func newServing(b *testing.B, n *sim.Node) *serving {
	b.Helper()
	run, state := volatile(b), b.TempDir()
	log, err := os.Create(filepath.Join(state, "log"))
	if err != nil {
		b.Fatal(err)
	}
	s := &serving{
		b: b, program: shared.Program(b, "gpu-cdi-plugin"), cdi: filepath.Join(run, "cdi"), log: log, kubelet: plugintest.New(b),
	}
	s.args = []string{
		s.program, "serve", "--root", n.Root(), "--cdi-dir", s.cdi, "--device-plugin-dir", s.kubelet.Dir, "--runtime-dir", run,
		"--state-dir", state, "--hook-path", "/usr/bin/prestart-hook",
	}
	s.kubelet.Start()
	b.Cleanup(func() {
		s.end()
		_ = log.Close()
	})
	return s
}

// start starts the plugin and returns how long it took until the kubelet had its list.
func (s *serving) start() time.Duration {
	s.b.Helper()
	s.end()
	begin := time.Now()
	p, err := proc.Start(proc.Cmd{Args: s.args}, s.log)
	if err != nil {
		s.b.Fatal(err)
	}
	s.process = p
	e := s.kubelet.WaitFor(gpus, func(list []*v1beta1.Device) bool { return len(list) == count })
	took := time.Since(begin)
	s.list, s.client = s.kubelet.Devices(gpus), e.Client
	return took
}

// end ends the plugin, if it runs, and waits until the kubelet knows.
func (s *serving) end() {
	s.b.Helper()
	if s.process == nil {
		return
	}
	if err := s.process.Signal(syscall.SIGTERM); err != nil || s.process.Code() != 0 {
		s.b.Fatalf("the plugin ends with %d, %v", s.process.Code(), err)
	}
	s.process = nil
	s.kubelet.WaitGone(gpus)
}

// allocate allocates one of the listed GPUs.
func (s *serving) allocate(i int) {
	s.b.Helper()
	_, err := s.client.Allocate(s.b.Context(), &v1beta1.AllocateRequest{
		ContainerRequests: []*v1beta1.ContainerAllocateRequest{{DevicesIds: []string{s.list[i].GetID()}}},
	})
	if err != nil {
		s.b.Fatal(err)
	}
}

// waiting starts a program that waits for the end of its input. The function that it returns ends it.
func waiting(b *testing.B, args []string) (p *proc.Process, end func()) {
	b.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		b.Fatal(err)
	}
	p, err = proc.Start(proc.Cmd{Args: append(args, "wait"), Stdin: r}, os.Stderr)
	if err != nil {
		b.Fatal(err)
	}
	_ = r.Close()
	return p, func() {
		_ = w.Close()
		<-p.Done()
	}
}

// resident is the memory of a process in megabytes: its own, and what is mapped from files. See proc_pid_status(5).
func resident(b *testing.B, pid int) (own, files float64) {
	b.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		b.Fatal(err)
	}
	var kilobytes float64
	for line := range strings.Lines(string(data)) {
		name, value, _ := strings.Cut(line, ":")
		if _, err := fmt.Sscanf(value, "%f kB", &kilobytes); err != nil {
			continue
		}
		switch name {
		case "RssAnon":
			own = kilobytes * 1024 / 1e6
		case "RssFile", "RssShmem":
			files += kilobytes * 1024 / 1e6
		}
	}
	return own, files
}

package soak

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// served is a simulated node with a kubelet, and serve as a process of the shipped program.
type served struct {
	*testing.T
	node    *sim.Node
	kubelet *kubelettest.Kubelet
	dir     string
	metrics string // URL
	process *proc.Process
}

// startServe starts serve on a node of a machine, with a configuration.
func startServe(t *testing.T, machine, config string) *served {
	t.Helper()
	s := &served{T: t, node: simtest.Node(t, machine), kubelet: kubelettest.New(t), dir: t.TempDir()}
	testenv.Must(s, image.AddGlibc(s.node.Root())) // for the driver's nvidia-smi, which resets GPUs
	config += fmt.Sprintf("\nlisten: 127.0.0.1:0\nstate-dir: %[1]s/state\nruntime-dir: %[1]s/run\n", s.dir)
	testenv.Must(s, os.WriteFile(filepath.Join(s.dir, "config.yaml"), []byte(config), 0o644))
	log, err := os.Create(filepath.Join(s.dir, "log"))
	testenv.Must(s, err)
	t.Cleanup(func() {
		if text, _ := os.ReadFile(log.Name()); t.Failed() {
			t.Logf("%s", text)
		}
		_ = log.Close()
	})
	s.kubelet.Start()
	s.process, err = proc.Start(s.command(
		"serve", "--device-plugin-dir", s.kubelet.Dir, "--hook-path", shared.Program(t, "prestart-hook")), log)
	testenv.Must(s, err)
	t.Cleanup(func() { testenv.Must(s, s.process.Kill()) })
	s.await("the address of the metrics", func() string {
		text, err := os.ReadFile(log.Name())
		testenv.Must(s, err)
		found := regexp.MustCompile(`address=(\S+)\n`).FindSubmatch(text)
		if found == nil {
			return "it is not in the log"
		}
		s.metrics = "http://" + string(found[1]) + "/metrics"
		return ""
	})
	return s
}

// command is a verb of the program on the node.
func (s *served) command(args ...string) proc.Cmd {
	s.Helper()
	return proc.Cmd{Args: append([]string{
		shared.Program(s.T, "gpu-cdi-plugin"), "--root", s.node.Root(), "--cdi-dir", filepath.Join(s.dir, "cdi"),
		"--config", filepath.Join(s.dir, "config.yaml"),
	}, args...)}
}

// await waits until problem returns nothing.
func (s *served) await(what string, problem func() string) {
	s.Helper()
	begin := time.Now()
	for text := problem(); text != ""; text = problem() {
		if time.Since(begin) > time.Minute {
			s.Fatalf("%s: %s", what, text)
		}
		time.Sleep(200 * time.Millisecond)
	}
}

// healthy are the UUIDs of the devices that are healthy for the kubelet. All replicas of a device must have its health.
func (s *served) healthy() (uuids []string) {
	all := map[string]bool{}
	for _, resource := range s.kubelet.Resources() {
		for _, d := range s.kubelet.Devices(resource) {
			uuid, _, _ := strings.Cut(d.GetID(), "::") // of a replica
			healthy := d.GetHealth() == v1beta1.Healthy
			if before, another := all[uuid]; another && before != healthy {
				s.Errorf("the replicas of %s differ in their health: %v", uuid, s.kubelet.Devices(resource))
			}
			all[uuid] = healthy
		}
	}
	maps.DeleteFunc(all, func(_ string, healthy bool) bool { return !healthy })
	return slices.Sorted(maps.Keys(all))
}

// usage is what a process uses.
type usage struct {
	Goroutines, Descriptors, Threads int
	Anonymous                        int // RssAnon in kilobytes; see proc_pid_status(5)
}

func (s *served) usage() usage {
	s.Helper()
	metrics := s.readMetrics()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.process.Pid()))
	testenv.Must(s, err)
	return usage{
		Goroutines: s.number(metrics, "go_goroutines"), Descriptors: s.number(metrics, "process_open_fds"),
		Threads: s.number(string(status), "Threads:"), Anonymous: s.number(string(status), "RssAnon:"),
	}
}

func (s *served) readMetrics() string {
	s.Helper()
	request, err := http.NewRequestWithContext(s.Context(), http.MethodGet, s.metrics, nil)
	testenv.Must(s, err)
	answer, err := http.DefaultClient.Do(request)
	testenv.Must(s, err)
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	testenv.Must(s, err)
	return string(text)
}

// number is the sum of the numbers at the end of the lines that begin with a name. There must be one.
func (s *served) number(text, name string) (sum int) {
	s.Helper()
	found := regexp.MustCompile(`(?m)^`+regexp.QuoteMeta(name)+`.*?\s(\d+)(?: kB)?$`).FindAllStringSubmatch(text, -1)
	if len(found) == 0 {
		s.Fatalf("there is no %s", name)
	}
	for _, match := range found {
		n, err := strconv.Atoi(match[1])
		testenv.Must(s, err)
		sum += n
	}
	return sum
}

// processorTime is what the process has used of the processors.
func (s *served) processorTime() time.Duration {
	s.Helper()
	// The identifier of a process's clock, by its process ID: MAKE_PROCESS_CPUCLOCK in linux/posix-timers.h.
	const scheduler = 2
	var used unix.Timespec
	testenv.Must(s, unix.ClockGettime(int32(^s.process.Pid()<<3|scheduler), &used))
	return time.Duration(used.Nano())
}

// processorTimeOf is what the process uses of the processors in a time from now.
func (s *served) processorTimeOf(length time.Duration) time.Duration {
	s.Helper()
	before := s.processorTime()
	time.Sleep(length)
	return s.processorTime() - before
}

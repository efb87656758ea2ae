package drivers

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// withoutLimits is the last of the tested branches whose MPS cannot limit memory.
const withoutLimits = 470

// hour is how often serve checks a daemon in an hour.
const hour = 360

// testMPS runs NVIDIA's MPS control daemon, which needs no GPU as long as it has no clients.
func (n *node) testMPS(t *testing.T) {
	if _, err := os.Stat(filepath.Join(n.root, "usr/bin/nvidia-cuda-mps-control")); err != nil {
		t.Skip("the packages have no nvidia-cuda-mps-control")
	}
	m := n.newMPS(t)
	// The daemon prints both limits of memory in gigabytes, rounded down.
	first := resource.MPSLimits{MemoryBytes: 6141 << 20, ThreadPercent: 50}
	second := resource.MPSLimits{MemoryBytes: 1500 << 20, ThreadPercent: 25}
	m.share(first)

	m.start()
	if n.branch() <= withoutLimits {
		if code := m.process.Code(); code != 1 {
			t.Errorf("mps ended with %d", code)
		}
		contains(t, "the log of mps", m.output(), "the driver's MPS cannot limit the memory of clients")
		return
	}
	m.await(first)
	m.hasLimits("5G", "50.0")
	t.Run("an hour of checks adds nothing to its log", func(t *testing.T) {
		before := m.output()
		for range hour {
			if a, err := m.status(`{}`); err != nil || a.Limits != first {
				t.Fatalf("the status is %+v, %v", a, err)
			}
		}
		if added := strings.TrimPrefix(m.output(), before); added != "" {
			t.Errorf("the log got\n%s", added)
		}
		// The only commands at rest are sent one every 10 minutes.
		m.control("get_default_device_pinned_mem_limit 0")
		if lines := strings.Count(strings.TrimPrefix(m.output(), before), "\n"); lines == 0 || lines >= 10 {
			t.Errorf("one command added %d lines to the log, want less than 10", lines)
		}
	})

	m.share(second)
	m.await(second)
	m.hasLimits("1G", "25.0")

	testenv.Must(t, syscall.Kill(m.pid(), syscall.SIGKILL))
	if code := m.process.Code(); code != 1 {
		t.Errorf("mps ended with %d after its daemon was killed", code)
	}
	contains(t, "the log of mps", m.output(), "nvidia-cuda-mps-control ended (signal: killed)")

	m.start()
	m.await(second)
	m.hasLimits("1G", "25.0")
	pid := m.pid()
	if _, err := m.status(`{"end": true}`); err == nil {
		t.Error("a request to end got an answer before the end")
	}
	if code := m.process.Code(); code != 0 {
		t.Errorf("mps ended with %d on request", code)
	}
	if err := syscall.Kill(pid, 0); err == nil {
		t.Error("the daemon did not end")
	}
}

// mps is `gpu-cdi-plugin mps` for the first GPU of a node.
type mps struct {
	*testing.T
	node    *node
	dir     string
	uuid    string
	log     *os.File
	process *proc.Process
}

func (n *node) newMPS(t *testing.T) *mps {
	t.Helper()
	dir, err := os.MkdirTemp("", "mps") //nolint:usetesting // t.TempDir may be too long for the paths of sockets
	testenv.Must(t, err)
	m := &mps{T: t, node: n, dir: dir}
	m.log, err = os.Create(filepath.Join(dir, "log"))
	testenv.Must(t, err, os.MkdirAll(m.path("state/devices"), 0o755), os.MkdirAll(m.path("mps"), 0o755),
		os.Symlink("/dev/shm", m.path("mps/shm")))
	var devices struct {
		Devices []struct{ UUID string }
	}
	testenv.Must(t, json.Unmarshal([]byte(plugin(t, 0, n.root, "devices", "-o", "json").Stdout), &devices))
	m.uuid = devices.Devices[0].UUID
	t.Cleanup(func() {
		if m.process != nil {
			_ = m.process.Signal(syscall.SIGTERM)
			<-m.process.Done()
		}
		if t.Failed() {
			t.Log(m.output())
		}
		testenv.Must(t, m.log.Close(), os.RemoveAll(dir))
	})
	return m
}

func (m *mps) path(name string) string { return filepath.Join(m.dir, name) }

// share writes the GPU's descriptor, as serve does.
func (m *mps) share(l resource.MPSLimits) {
	m.Helper()
	text := fmt.Sprintf(`{"sharing": {"replicas": 2, "mps": {"memoryLimitBytes": %d, "activeThreadPercentage": %d}}}`,
		l.MemoryBytes, l.ThreadPercent)
	file := m.path("state/devices/" + m.uuid + ".json")
	testenv.Must(m, os.WriteFile(file+".new", []byte(text), 0o644), os.Rename(file+".new", file))
}

func (m *mps) start() {
	m.Helper()
	var err error
	m.process, err = proc.Start(proc.Cmd{Args: []string{
		shared.Program(m.T, "gpu-cdi-plugin"), "--root", m.node.root, "mps", "--gpu", m.uuid,
		"--state-dir", m.path("state"), "--runtime-dir", m.dir,
	}}, m.log)
	testenv.Must(m, err)
}

// status is the answer to a request of serve.
func (m *mps) status(request string) (answer struct{ Limits resource.MPSLimits }, err error) {
	conn, err := (&net.Dialer{}).DialContext(m.Context(), "unix", m.path("mps/"+m.uuid+"/daemon/status.sock"))
	if err != nil {
		return answer, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		return answer, err
	}
	if _, err := fmt.Fprintln(conn, request); err != nil {
		return answer, err
	}
	return answer, json.NewDecoder(conn).Decode(&answer)
}

// await waits until the daemon has limits.
func (m *mps) await(l resource.MPSLimits) {
	m.Helper()
	testenv.Eventually(m, "the daemon is ready", func() bool {
		select {
		case <-m.process.Done():
			m.Fatalf("mps ended with %d", m.process.Code())
		default:
		}
		a, err := m.status(`{}`)
		return err == nil && a.Limits == l
	})
}

// control sends a command to the daemon by NVIDIA's program.
func (m *mps) control(command string) string {
	m.Helper()
	res := proc.Must(m, 0, proc.Cmd{
		Args:  []string{filepath.Join(m.node.root, "usr/bin/nvidia-cuda-mps-control")},
		Env:   []string{"CUDA_MPS_PIPE_DIRECTORY=" + m.path("mps/"+m.uuid+"/pipe")},
		Stdin: strings.NewReader(command + "\n"),
	})
	return strings.TrimSpace(res.Stdout)
}

func (m *mps) hasLimits(memory, threads string) {
	m.Helper()
	got := m.control("get_default_device_pinned_mem_limit 0") + " " + m.control("get_default_active_thread_percentage")
	if want := memory + " " + threads; got != want {
		m.Errorf("the daemon says %q, want %q", got, want)
	}
}

// pid is the process ID of the daemon, the only child of mps while no command is sent. Before 550 NVIDIA's
// daemon writes it into no file.
func (m *mps) pid() (pid int) {
	m.Helper()
	testenv.Eventually(m, "mps has one child", func() bool {
		var children []string
		files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", m.process.Pid()))
		testenv.Must(m, err)
		for _, file := range files {
			data, _ := os.ReadFile(file)
			children = append(children, strings.Fields(string(data))...)
		}
		if len(children) != 1 {
			return false
		}
		pid, err = strconv.Atoi(children[0])
		return err == nil
	})
	return pid
}

// output is what mps and its daemons have printed.
func (m *mps) output() string {
	m.Helper()
	data, err := os.ReadFile(m.log.Name())
	testenv.Must(m, err)
	return string(data)
}

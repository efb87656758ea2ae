package libtest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/test/lib/testenv"
)

const firstGPU = "GPU-00000000-0000-4000-8000-000000000000"

// mps runs the programs of MPS with a pipe and a log directory.
type mps struct {
	t          *testing.T
	node       *node
	pipe, logs string
	visible    string // CUDA_VISIBLE_DEVICES
}

func newMPS(t *testing.T, visible string) *mps {
	t.Helper()
	m := &mps{t: t, node: newTestNode(t, asan), pipe: t.TempDir(), logs: t.TempDir(), visible: visible}
	t.Cleanup(m.quit)
	return m
}

// quit ends the daemon and its servers.
func (m *mps) quit() {
	m.control("quit -t 0")
	if _, err := os.Lstat(m.pidFile()); err == nil {
		m.t.Errorf("the daemon of %s runs after quit", m.pipe)
	}
}

// pidFile exists while the daemon runs, and after it was killed.
func (m *mps) pidFile() string { return filepath.Join(m.pipe, "nvidia-cuda-mps-control.pid") }

// withPipe is the same with another pipe directory.
func (m *mps) withPipe(pipe string) *mps {
	other := *m
	other.pipe = pipe
	return &other
}

func (m *mps) command(name string, args ...string) *exec.Cmd {
	dir := m.node.flavour.dir(m.t)
	cmd := exec.Command(filepath.Join(dir, name), args...)
	cmd.Env = append(os.Environ(), "TZ=UTC", "PATH="+dir+":"+os.Getenv("PATH"), "CUDA_VISIBLE_DEVICES="+m.visible,
		"LD_LIBRARY_PATH="+filepath.Dir(m.node.library),
		"CUDA_MPS_PIPE_DIRECTORY="+m.pipe, "CUDA_MPS_LOG_DIRECTORY="+m.logs)
	return cmd
}

// start starts the daemon in the background.
func (m *mps) start() {
	m.t.Helper()
	if status, out := finish(m.t, m.command("nvidia-cuda-mps-control", "-d")); status != 0 {
		m.t.Fatalf("start the daemon: status %d\n%s", status, out)
	}
}

// control sends commands to the daemon and returns the exit status and the output.
func (m *mps) control(commands ...string) (int, string) {
	m.t.Helper()
	cmd := m.command("nvidia-cuda-mps-control")
	cmd.Stdin = strings.NewReader(strings.Join(commands, "\n") + "\n")
	return finish(m.t, cmd)
}

// log returns a log file.
func (m *mps) log(name string) string {
	m.t.Helper()
	data, err := os.ReadFile(filepath.Join(m.logs, name))
	if err != nil {
		m.t.Fatal(err)
	}
	return string(data)
}

func finish(t *testing.T, cmd *exec.Cmd) (int, string) {
	t.Helper()
	out, err := cmd.CombinedOutput()
	var failed *exec.ExitError
	if err != nil && !errors.As(err, &failed) {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), string(out)
}

// TestMPSCommands compares the front end's output with that of the real program.
func TestMPSCommands(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ commands, want, log string }{
		"an idle daemon has no server": {"get_server_list", "", ""},
		"all threads are the default":  {"get_default_active_thread_percentage", "100.0\n", ""},
		"a percentage is printed": {
			"set_default_active_thread_percentage 25\nget_default_active_thread_percentage", "25.0\n25.0\n", "",
		},
		"more than 100 % change nothing": {
			"set_default_active_thread_percentage 101", "100.0\n",
			"Invalid percentage, expected between (0.0, 100.0]",
		},
		"no percentage changes nothing": {
			"set_default_active_thread_percentage", "100.0\n",
			"Invalid percentage",
		},
		"there is no default memory limit": {
			"get_default_device_pinned_mem_limit 0", "",
			"No default pinned memory limit set for the device!",
		},
		"a memory limit in gigabytes": {
			"set_default_device_pinned_mem_limit 0 2G\nget_default_device_pinned_mem_limit 0", "2G\n", "",
		},
		"whole gigabytes are printed as such": {
			"set_default_device_pinned_mem_limit 0 20480M\nget_default_device_pinned_mem_limit 0", "20G\n", "",
		},
		"a part of a gigabyte is not printed": {
			"set_default_device_pinned_mem_limit 0 1500M\nget_default_device_pinned_mem_limit 0", "1G\n", "",
		},
		"less than a gigabyte is in megabytes": {
			"set_default_device_pinned_mem_limit 0 1000M\nget_default_device_pinned_mem_limit 0", "1000M\n", "",
		},
		"a limit of a UUID is not stored": {"set_default_device_pinned_mem_limit " + firstGPU +
			" 2G\nget_default_device_pinned_mem_limit 0", "", ""},
		"each device has its own limit": {
			"set_default_device_pinned_mem_limit 5 2G\nget_default_device_pinned_mem_limit 0", "", "",
		},
		"clients of a server that is absent": {"get_client_list 1", "Server 1 not found\n", ""},
		"clients of no server":               {"get_client_list", "Server 0 not found\n", ""},
		"the limit of an absent server":      {"set_device_pinned_mem_limit 1 0 2G", "Server 1 not found\n", ""},
		"the threads of an absent server":    {"get_active_thread_percentage 1", "Server 1 not found\n", ""},
		"the status of an absent server":     {"get_server_status 1", "Server 1 not found\n", ""},
		"no devices are in use":              {"get_device_client_list", "", ""},
		"a server needs a user": {
			"start_server",
			"A user id (UID) is required to start a new server\n", "",
		},
		"a user is a number": {
			"start_server -uid x",
			"A user id (UID) is required to start a new server\n", "",
		},
		"an unknown command is named":         {"nonsense 1 2", "Unknown command \"nonsense\"\n", ""},
		"an empty line is an unknown command": {"", "Unknown command \"\"\n", ""},
		"a command is not the beginning of a word": {
			"get_server_listing", "Unknown command \"get_server_listing\"\n",
			"",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newMPS(t, firstGPU)
			m.start()
			status, out := m.control(test.commands)
			if diff := cmp.Diff(test.want, out); diff != "" || status != 0 {
				t.Errorf("status %d, output (-want +got):\n%s", status, diff)
			}
			if log := m.log("control.log"); !strings.Contains(log, test.log) ||
				!strings.Contains(log, "Cmd:"+strings.Split(test.commands, "\n")[0]+"\n") {
				t.Errorf("control.log lacks the command or %q:\n%s", test.log, log)
			}
		})
	}
}

func TestMPSDaemonFiles(t *testing.T) {
	t.Parallel()
	m := newMPS(t, firstGPU)
	m.start()
	want := []string{
		"Srw-rw-rw- control", "-rw-rw-rw- control_lock", "Srwxr-xr-x control_privileged", "prwxrwxrwx log",
		"-rw-r--r-- nvidia-cuda-mps-control.pid",
	}
	if diff := cmp.Diff(want, modes(t, m.pipe)); diff != "" {
		t.Errorf("pipe directory (-want +got):\n%s", diff)
	}
	pid, err := os.ReadFile(m.pidFile())
	if err != nil {
		t.Fatal(err)
	}
	name, _ := os.ReadFile("/proc/" + strings.TrimSpace(string(pid)) + "/comm")
	if !strings.HasPrefix("nvidia-cuda-mps-control\n", strings.TrimSpace(string(name))) {
		t.Errorf("the pid file names process %s, which is %q", pid, name)
	}
	if status, out := m.control("quit"); status != 0 || out != "" {
		t.Errorf("quit: status %d\n%s", status, out)
	}
	if diff := cmp.Diff(want[:3], modes(t, m.pipe)); diff != "" {
		t.Errorf("pipe directory after quit (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"-rw-r--r-- control.log", "-rw-r--r-- server.log"}, modes(t, m.logs)); diff != "" {
		t.Errorf("log directory (-want +got):\n%s", diff)
	}
	if log := m.log("control.log"); !strings.HasSuffix(log, "Exit with status 0\n") {
		t.Errorf("control.log:\n%s", log)
	}
}

func modes(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var list []string
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, info.Mode().String()+" "+e.Name())
	}
	return list
}

func TestMPSOneDaemon(t *testing.T) {
	t.Parallel()
	m := newMPS(t, firstGPU)
	if status, out := m.control("get_server_list"); status != 1 || out != "Cannot find MPS control daemon process\n" {
		t.Errorf("without a daemon: status %d\n%s", status, out)
	}
	m.start()
	for _, option := range []string{"-d", "-f"} {
		status, out := finish(t, m.command("nvidia-cuda-mps-control", option))
		if status != 1 || out != "An instance of this daemon is already running\n" {
			t.Errorf("a second one with %s: status %d\n%s", option, status, out)
		}
	}
	m.kill()
	if status, _ := m.control("get_server_list"); status != 1 {
		t.Errorf("after it was killed: status %d, want 1", status)
	}
	m.start() // files of the killed daemon do not matter
	if status, out := m.control("get_server_list"); status != 0 {
		t.Errorf("a new one: status %d\n%s", status, out)
	}
	none := m.withPipe(filepath.Join(m.pipe, "none"))
	if status, out := finish(t, none.command("nvidia-cuda-mps-control", "-f")); status != 1 ||
		out != "Cannot access CUDA_MPS_PIPE_DIRECTORY="+none.pipe+"\n" {
		t.Errorf("no pipe directory: status %d\n%s", status, out)
	}
	long := m.withPipe(filepath.Join(t.TempDir(), strings.Repeat("x", 110)))
	if err := os.Mkdir(long.pipe, 0o755); err != nil {
		t.Fatal(err)
	}
	if status, _ := finish(t, long.command("nvidia-cuda-mps-control", "-f")); status != 1 {
		t.Errorf("a path longer than a socket's can be: status %d, want 1", status)
	}
}

// kill kills the daemon.
func (m *mps) kill() {
	m.t.Helper()
	data, err := os.ReadFile(m.pidFile())
	if err != nil {
		m.t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil {
		m.t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		m.t.Fatal(err)
	}
	m.eventually("the daemon is gone", func() bool {
		status, _ := finish(m.t, m.command("nvidia-cuda-mps-control"))
		return status == 1
	})
}

func (m *mps) eventually(what string, holds func() bool) {
	m.t.Helper()
	for end := time.Now().Add(20 * time.Second); !holds(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			m.t.Fatalf("not within 20 seconds: %s", what)
		}
	}
}

// TestMPSForeground checks that debug messages go to standard output and not to log files.
func TestMPSForeground(t *testing.T) {
	t.Parallel()
	m := newMPS(t, firstGPU)
	cmd := m.command("nvidia-cuda-mps-control", "-f")
	var out strings.Builder
	cmd.Stdout = &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	m.eventually("the daemon replies", func() bool {
		status, _ := m.control("get_server_list")
		return status == 0
	})
	if status, out := finish(t, m.command("cuda-mps-client")); status != 0 {
		t.Errorf("client: status %d\n%s", status, out)
	}
	if status, out := m.control("quit"); status != 0 {
		t.Errorf("quit: status %d\n%s", status, out)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("daemon: %v", err)
	}
	for _, line := range []string{
		"Starting control daemon using socket " + m.pipe + "/control\n",
		"Starting new server ", "Server has started\n", "Exit with status 0\n",
	} {
		if !strings.Contains(out.String(), line) {
			t.Errorf("the daemon did not print %q:\n%s", line, out.String())
		}
	}
	if files := modes(t, m.logs); len(files) > 0 {
		t.Errorf("log files: %v", files)
	}
}

// holder is a client that stays connected.
type holder struct {
	cmd *exec.Cmd
	out func() string // its output so far
}

// hold starts a client and waits until it has connected or ended.
func (m *mps) hold(cmd *exec.Cmd) *holder {
	m.t.Helper()
	h := &holder{cmd, printed(m.t, cmd)}
	if err := cmd.Start(); err != nil {
		m.t.Fatal(err)
	}
	m.t.Cleanup(func() { _ = cmd.Process.Kill() })
	m.eventually("the client prints something", func() bool { return h.out() != "" })
	return h
}

// printed redirects a program's output to a file and returns a function that reads it.
func printed(t *testing.T, cmd *exec.Cmd) func() string {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	cmd.Stdout, cmd.Stderr = f, f
	return func() string {
		text, err := os.ReadFile(f.Name())
		if err != nil {
			t.Error(err)
		}
		return string(text)
	}
}

var serverID = regexp.MustCompile(`server=\d+`)

// withoutPID is the output of a client without the server's process id.
func withoutPID(out string) string { return serverID.ReplaceAllString(out, "server=N") }

func clientOutput(threads string, limit int) string {
	return fmt.Sprintf("server=N active_thread_percentage=%s\ndevice=0 uuid=%s pinned_mem_limit=%d\n", threads,
		firstGPU, limit)
}

func TestMPSClients(t *testing.T) {
	t.Parallel()
	m := newMPS(t, firstGPU)
	m.start()
	m.control("set_default_active_thread_percentage 25", "set_default_device_pinned_mem_limit 0 1500M")
	first, second := m.hold(m.command("cuda-mps-client", "60")), m.hold(m.command("cuda-mps-client", "60"))
	for _, h := range []*holder{first, second} {
		if diff := cmp.Diff(clientOutput("25.0", 1500<<20), withoutPID(h.out())); diff != "" {
			t.Errorf("output of a client (-want +got):\n%s", diff)
		}
	}
	_, servers := m.control("get_server_list")
	server := strings.TrimSpace(servers)
	pids := fmt.Sprintf("%d\n%d\n", first.cmd.Process.Pid, second.cmd.Process.Pid)
	for command, want := range map[string]string{
		"get_client_list " + server:   pids,
		"get_server_status " + server: "ACTIVE\n",
		"get_device_client_list": strings.ReplaceAll("\n"+pids, "\n",
			"\n"+firstGPU+" ")[1 : 2*len(firstGPU)+len(pids)+3],
		"get_device_client_list 1":         "",
		"start_server -uid " + currentID(): "",
	} {
		if _, out := m.control(command); out != want {
			t.Errorf("%s: %q, want %q", command, out, want)
		}
	}
	if _, again := m.control("get_server_list"); again != servers {
		t.Errorf("servers %q, want the same: %q", again, servers)
	}

	// Default limits apply to the next server.
	m.control("set_default_active_thread_percentage 50", "set_default_device_pinned_mem_limit 0 2G")
	if _, out := finish(t, m.command("cuda-mps-client")); withoutPID(out) != clientOutput("25.0", 1500<<20) {
		t.Errorf("a client of the running server has other limits:\n%s", out)
	}
	// Limits of a server apply to its next clients.
	_, out := m.control("set_active_thread_percentage "+server+" 10", "get_active_thread_percentage "+server,
		"set_device_pinned_mem_limit "+server+" 0 3000M", "get_device_pinned_mem_limit "+server+" 0")
	if want := "10.0\n10.0\n2G\n"; out != want {
		t.Errorf("a server's limits: %q, want %q", out, want)
	}
	if _, out := finish(t, m.command("cuda-mps-client")); withoutPID(out) != clientOutput("10.0", 3000<<20) {
		t.Errorf("a client of a server with new limits has other limits:\n%s", out)
	}
	if err := first.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	m.eventually("the killed client is removed", func() bool {
		_, out := m.control("get_client_list " + server)
		return out == fmt.Sprintf("%d\n", second.cmd.Process.Pid)
	})
	if status, _ := m.control("quit -t 0"); status != 1 {
		t.Errorf("quit with a server killed: status %d, want 1", status)
	}
	if err := second.cmd.Wait(); err == nil || !strings.Contains(second.out(), "MPS error 806") {
		t.Errorf("a client whose server was killed: %v\n%s", err, second.out())
	}
	id, _ := strconv.Atoi(server)
	if left, _ := filepath.Glob(fmt.Sprintf("/dev/shm/cuda.shm.*.%x.1", id)); len(left) > 0 {
		t.Errorf("shared memory left: %v", left)
	}
}

func currentID() string { return strconv.Itoa(os.Getuid()) }

// TestMPSQuitWaits checks that quit waits for the clients, and that new clients are rejected.
func TestMPSQuitWaits(t *testing.T) {
	t.Parallel()
	m := newMPS(t, firstGPU)
	m.start()
	client := m.hold(m.command("cuda-mps-client", "60"))
	quit := m.command("nvidia-cuda-mps-control")
	quit.Stdin = strings.NewReader("quit\n")
	if err := quit.Start(); err != nil {
		t.Fatal(err)
	}
	m.eventually("the daemon shuts down", func() bool { return strings.Contains(m.log("control.log"), "Cmd:quit\n") })
	if status, out := finish(t, m.command("cuda-mps-client")); status != 1 || !strings.Contains(out, "MPS error 807") {
		t.Errorf("a new client: status %d\n%s", status, out)
	}
	if err := client.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := quit.Wait(); err != nil {
		t.Errorf("quit: %v", err)
	}
	if log := m.log("control.log"); !strings.HasSuffix(log, "Exit with status 0\n") {
		t.Errorf("control.log:\n%s", log)
	}
}

func TestMPSDevices(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		visible string
		status  int
		log     string
	}{
		"a UUID":            {firstGPU, 0, "Creating server context on device 0 (NVIDIA H100 80GB HBM3)"},
		"an index":          {"1", 0, "Creating server context on device 0 "},
		"two":               {"0," + firstGPU, 0, "Creating server context on device 1 "},
		"a MIG device":      {"MIG-00000003-0000-4000-8000-000000000100", 0, "(NVIDIA H100 80GB HBM3 MIG 1g.10gb)"},
		"an unknown UUID":   {"GPU-none", 1, "device GPU-none of CUDA_VISIBLE_DEVICES does not exist"},
		"an index too many": {"0,7", 1, "device 7 of CUDA_VISIBLE_DEVICES does not exist"},
		"none":              {"", 1, "does not exist"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newMPS(t, test.visible)
			m.start()
			status, out := finish(t, m.command("cuda-mps-client"))
			if status != test.status || (status != 0) != strings.Contains(out, "MPS error 807") {
				t.Errorf("client: status %d, want %d\n%s", status, test.status, out)
			}
			m.eventually("the server logged the reason",
				func() bool { return strings.Contains(m.log("server.log"), test.log) })
			if test.status != 0 {
				m.control("start_server -uid " + currentID())
				m.eventually("the log has both exits",
					func() bool { return strings.Count(m.log("control.log"), " exited with status 1\n") == 2 })
			}
		})
	}
}

// TestMPSClientElsewhere checks that a container without the daemon's /dev/shm or the GPU cannot be a client.
func TestMPSClientElsewhere(t *testing.T) {
	testenv.Root(t)
	t.Parallel()
	m := newMPS(t, firstGPU)
	m.start()
	for name, test := range map[string]struct{ hide, want string }{
		"the same place":   {"true", ""},
		"other /dev/shm":   {"mount -t tmpfs none /dev/shm", "is not here: No such file or directory"},
		"no node of a GPU": {"mount -t tmpfs none " + m.node.path("dev"), "the server has a device that is not here"},
	} {
		cmd := m.command("cuda-mps-client")
		cmd.Args = []string{"sh", "-ec", test.hide + "; exec " + cmd.Path}
		cmd.Path = testenv.Command(t, "sh")
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
		status, out := finish(t, cmd)
		if (status != 0) != (test.want != "") || !strings.Contains(out, test.want) {
			t.Errorf("%s: status %d, want %q\n%s", name, status, test.want, out)
		}
	}
	_, servers := m.control("get_server_list")
	if _, clients := m.control("get_client_list " + strings.TrimSpace(servers)); clients != "" {
		t.Errorf("rejected clients are listed: %q", clients)
	}
}

// TestMPSUsers checks that another user's client waits until those of the first user have ended.
func TestMPSUsers(t *testing.T) {
	testenv.Root(t)
	t.Parallel()
	m := newMPS(t, firstGPU)
	for _, dir := range []string{filepath.Dir(m.pipe), m.pipe} {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	m.start()
	root := m.hold(m.command("cuda-mps-client", "60"))
	other := m.command("cuda-mps-client")
	other.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out := printed(t, other)
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	m.eventually("the other client waits", func() bool {
		return strings.Contains(m.log("control.log"),
			"from user 65534: Server is not ready, push client to pending list")
	})
	if out() != "" {
		t.Errorf("the other client did not wait:\n%s", out())
	}
	if err := root.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := other.Wait(); err != nil {
		t.Errorf("the other client: %v\n%s%s", err, out(), m.log("server.log"))
	}
	starts := regexp.MustCompile(`Starting new server \d+ for user (\d+)`).FindAllStringSubmatch(m.log("control.log"),
		-1)
	users := slices.Collect(func(yield func(string) bool) {
		for _, s := range starts {
			yield(s[1])
		}
	})
	if diff := cmp.Diff([]string{"0", "65534"}, users); diff != "" {
		t.Errorf("servers' users (-want +got):\n%s", diff)
	}
	if status, _ := m.control("quit"); status != 0 {
		t.Errorf("quit: status %d", status)
	}
}

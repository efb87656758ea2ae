package podresources_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// TestMain also is a program that does nothing until its standard input ends.
func TestMain(m *testing.M) {
	if os.Getenv("WAIT_FOR_STDIN") != "" {
		_, _ = os.Stdin.Read(make([]byte, 1))
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// newSource returns a source for a directory of device plugins, kubelet/device-plugins, on this host.
func newSource(t *testing.T) *podresources.Source {
	t.Helper()
	h, err := host.New("/", "", "")
	testenv.Must(t, err)
	dir := filepath.Join(t.TempDir(), "kubelet", "device-plugins")
	testenv.Must(t, os.MkdirAll(dir, 0o755))
	return &podresources.Source{Host: h, PluginDir: dir}
}

// A host without a kubelet has no pods. Where there is one, a missing socket says nothing about them.
func TestAMissingSocket(t *testing.T) {
	for name, c := range map[string]struct {
		files   []string // in the directory of device plugins
		unknown bool
	}{
		"no kubelet":                     {},
		"a kubelet runs":                 {[]string{"kubelet.sock"}, true},
		"a kubelet has left its files":   {[]string{kubelet.CheckpointName}, false},
		"a kubelet runs and has no file": {[]string{kubelet.CheckpointName, "kubelet.sock"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSource(t)
			for _, file := range c.files {
				testenv.Must(t, os.WriteFile(filepath.Join(s.PluginDir, file), nil, 0o600))
			}
			answer, err := s.List(t.Context())
			if errors.Is(err, podresources.ErrUnknown) != c.unknown || (err == nil) == c.unknown || answer.Runs {
				t.Errorf("%v, error %v; unknown: %v", answer, err, c.unknown)
			}
		})
	}
}

// The kubelet replaces its files. They are read again only then.
func TestTheFilesOfAKubelet(t *testing.T) {
	s := newSource(t)
	write := func(dir, name, content string) {
		t.Helper()
		testenv.Must(t, os.WriteFile(filepath.Join(dir, "new"), []byte(content), 0o600),
			os.Rename(filepath.Join(dir, "new"), filepath.Join(dir, name)))
	}
	none, before, err := s.Checkpoint()
	if claims, claimsErr := s.Claims(); none != nil || len(claims) > 0 || errors.Join(err, claimsErr) != nil {
		t.Errorf("without files: %v, %v, errors %v, %v", none, claims, err, claimsErr)
	}
	write(s.PluginDir, kubelet.CheckpointName, checkpoint("GPU-1"))
	write(filepath.Dir(s.PluginDir), kubelet.ClaimsName, `{"Data":"{\"kind\":\"DRACheckpoint\",\"ClaimInfoStateList\":`+
		`[{\"ClaimUID\":\"c\"}]}","Checksum":1}`)
	first, version, err := s.Checkpoint()
	testenv.Must(t, err)
	if len(first.PodDeviceEntries) != 1 || version == before {
		t.Errorf("the file is %v, its version %v", first, version)
	}
	if again, same, err := s.Checkpoint(); again != first || same != version || err != nil {
		t.Errorf("it was parsed again: %p %p", again, first)
	}
	if claims, err := s.Claims(); err != nil || len(claims) != 1 || claims[0].UID != "c" {
		t.Errorf("the claims are %v, error %v", claims, err)
	}
	write(s.PluginDir, kubelet.CheckpointName, "{")
	if _, other, err := s.Checkpoint(); err == nil || other == version || !strings.Contains(err.Error(), s.PluginDir) {
		t.Errorf("a damaged file: version %v, error %v", other, err)
	}
	testenv.Must(t, os.Remove(filepath.Join(s.PluginDir, kubelet.CheckpointName)))
	if none, version, err := s.Checkpoint(); none != nil || version != before || err != nil {
		t.Errorf("after its removal: %v, version %v, error %v", none, version, err)
	}
}

// A file that could not be read is read again, also if the kubelet has not replaced it.
func TestAFileThatCannotBeReadAtFirst(t *testing.T) {
	s := newSource(t)
	path := filepath.Join(s.PluginDir, kubelet.CheckpointName)
	at := time.Now()
	testenv.Must(t, os.WriteFile(path, []byte(checkpoint("GPU-1")), 0o600))
	info, err := os.Stat(path)
	testenv.Must(t, err, os.Truncate(path, 65<<20), os.Chtimes(path, at, at))
	if _, _, err := s.Checkpoint(); err == nil {
		t.Error("a file that is too large is read")
	}
	testenv.Must(t, os.Truncate(path, info.Size()), os.Chtimes(path, at, at))
	if c, _, err := s.Checkpoint(); err != nil || len(c.PodDeviceEntries) != 1 {
		t.Errorf("then it is %v, error %v", c, err)
	}
}

// checkpoint returns a kubelet's checkpoint with a pod that has devices, or without pods.
func checkpoint(ids ...string) string {
	var c kubelet.Checkpoint
	if len(ids) > 0 {
		c.PodDeviceEntries = []kubelet.Entry{{
			PodUID: "u", ContainerName: "c", ResourceName: "nvidia.com/gpu",
			DeviceIDs: map[int64][]string{kubelet.NoNode: ids},
		}}
	}
	data, err := c.Marshal()
	if err != nil {
		panic(err)
	}
	return string(data)
}

func TestPath(t *testing.T) {
	s := newSource(t)
	beside := filepath.Join(filepath.Dir(s.PluginDir), "pod-resources", "kubelet.sock")
	if got := s.Path(); got != beside {
		t.Errorf("without a kubelet the path is %s, want %s", got, beside)
	}
	// A kubelet of the host has its socket below its own root directory. Programs that only have its name do not count.
	root := t.TempDir()
	socket := filepath.Join(root, "pod-resources/kubelet.sock")
	for name, c := range map[string]struct {
		attr *syscall.SysProcAttr
		args []string
	}{
		"in a container": {&syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}, []string{"--root-dir=" + root}},
		"of another user": {
			&syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534}}, []string{"--root-dir=" + root},
		},
		"without the option": {nil, []string{"-v=2", "root-dir=" + root}},
		"without a value":    {nil, []string{"--root-dir"}},
	} {
		t.Run(name, func(t *testing.T) {
			startKubelet(t, c.attr, c.args...)
			if got := s.Path(); got != beside {
				t.Errorf("the path is %s, want %s", got, beside)
			}
		})
	}
	startKubelet(t, nil, "--v=2", "--root-dir", root)
	if got := s.Path(); got != socket {
		t.Errorf("with a running kubelet the path is %s, want %s", got, socket)
	}
	testenv.Must(t, os.Mkdir(filepath.Dir(beside), 0o755))
	serve(t, &kubelettest.PodResources{}, beside)
	if got := s.Path(); got != beside {
		t.Errorf("with a socket beside the directory the path is %s, want %s", got, beside)
	}
	s.Socket = "/elsewhere.sock"
	if got := s.Path(); got != s.Socket {
		t.Errorf("a configured path is %s, want %s", got, s.Socket)
	}
}

// startKubelet starts a program with the name and the arguments of a kubelet.
func startKubelet(t *testing.T, attr *syscall.SysProcAttr, args ...string) {
	t.Helper()
	testenv.Root(t)
	dir := t.TempDir()
	testenv.Must(t, os.Chmod(filepath.Dir(dir), 0o755)) // any user can run the program
	program := filepath.Join(dir, "kubelet")
	data, err := os.ReadFile("/proc/self/exe")
	testenv.Must(t, err)
	testenv.WriteProgram(t, program, data)
	cmd := exec.Command(program, args...)
	cmd.SysProcAttr = attr
	cmd.Env = append(os.Environ(), "WAIT_FOR_STDIN=1")
	stdin, err := cmd.StdinPipe()
	testenv.Must(t, err)
	testenv.Must(t, cmd.Start())
	t.Cleanup(func() {
		_ = stdin.Close()
		_ = cmd.Wait()
	})
}

package devcgroup

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// hierarchy returns where the device cgroups of this machine are mounted.
func hierarchy(t *testing.T, unified bool) string {
	t.Helper()
	testenv.Root(t)
	point, magic := host.Cgroups+"/devices", int64(unix.CGROUP_SUPER_MAGIC)
	if unified {
		point, magic = host.Cgroups, unix.CGROUP2_SUPER_MAGIC
		if !isMounted(point, magic) {
			point += "/unified"
		}
	}
	if !isMounted(point, magic) {
		testenv.Skip(t, "needs both versions of cgroups")
	}
	return point
}

var cgroups atomic.Int64

// makeCgroup makes a cgroup, which is removed with the test.
func makeCgroup(t *testing.T, unified bool) string {
	t.Helper()
	name := fmt.Sprintf("devcgroup-test-%d-%d", os.Getpid(), cgroups.Add(1))
	return makeBelow(t, hierarchy(t, unified), name)
}

// makeBelow makes a cgroup in another one, or returns that if the name is empty.
func makeBelow(t *testing.T, dir, name string) string {
	t.Helper()
	if name == "" {
		return dir
	}
	dir = filepath.Join(dir, name)
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // the kernel removes processes from it some time after their end
		testenv.Eventually(t, "the cgroup can be removed", func() bool { return os.Remove(dir) == nil })
	})
	return dir
}

// sleeper starts a process in a cgroup, which ends with the test.
func sleeper(t *testing.T, dir string) (pid int) {
	t.Helper()
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	write(t, filepath.Join(dir, "cgroup.procs"), strconv.Itoa(cmd.Process.Pid))
	return cmd.Process.Pid
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func mustAllow(t *testing.T, pid int, rules ...Rule) {
	t.Helper()
	if err := allow(t.Context(), host, pid, rules...); err != nil {
		t.Fatal(err)
	}
}

// accesses returns what a process in a cgroup can do with the device 195:7: some of the letters r, w, b (read and write
// at once) and m.
func accesses(t *testing.T, dir string, kind byte) string {
	t.Helper()
	tmp := t.TempDir()
	script := fmt.Sprintf(`echo $$ >"$1/cgroup.procs"; cd "$2"
case $(mknod made %c 195 7 2>&1) in '') printf m ;; esac
case $( (: <node) 2>&1) in *"such device"*) printf r ;; esac
case $( (: >node) 2>&1) in *"such device"*) printf w ;; esac
case $( (: <>node) 2>&1) in *"such device"*) printf b ;; esac`, kind)
	mode := uint32(unix.S_IFCHR)
	if kind == 'b' {
		mode = unix.S_IFBLK
	}
	if err := unix.Mknod(filepath.Join(tmp, "node"), mode|0o666, int(unix.Mkdev(195, 7))); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("busybox", "sh", "-c", script, "sh", dir, tmp).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return string(out)
}

// denyAll is a device program that admits nothing.
var denyAll = asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}

func attach(t *testing.T, dir string, code asm.Instructions, flags uint32) {
	t.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.CGroupDevice, Instructions: code, License: "Apache-2.0"})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	err = link.RawAttachProgram(link.RawAttachProgramOptions{
		Target: int(openDir(t, dir).Fd()), Program: p, Attach: ebpf.AttachCGroupDevice, Flags: flags,
	})
	if err != nil {
		t.Fatal(err)
	}
}

func openDir(t *testing.T, dir string) *os.File {
	t.Helper()
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func attached(t *testing.T, dir string) []link.AttachedProgram {
	t.Helper()
	programs, err := filters(openDir(t, dir))
	if err != nil {
		t.Fatal(err)
	}
	return programs
}

func TestAccess(t *testing.T) {
	for _, c := range []struct {
		kind   byte
		access string
		want   string
	}{
		{'c', "rw", "rwb"}, {'c', "r", "r"}, {'c', "w", "w"}, {'c', "m", "m"}, {'c', "rwm", "mrwb"}, {'b', "rw", "rwb"},
	} {
		for _, unified := range []bool{false, true} {
			t.Run(fmt.Sprintf("%c %s unified %v", c.kind, c.access, unified), func(t *testing.T) {
				t.Parallel()
				dir := makeCgroup(t, unified)
				restrict(t, dir, unified)
				rules := []Rule{{'c', 195, 8, "rwm"}, {'c', 194, 7, "rwm"}, {'c' + 'b' - c.kind, 195, 7, "rwm"}}
				for _, letter := range c.access {
					rules = append(rules, Rule{c.kind, 195, 7, string(letter)})
				}
				mustAllow(t, sleeper(t, dir), rules...)
				if got := accesses(t, dir, c.kind); got != c.want {
					t.Errorf("access %q, want %q", got, c.want)
				}
			})
		}
	}
}

// TestPrograms guards against a program that is left: each one denies.
func TestPrograms(t *testing.T) {
	for count := range 4 {
		t.Run(fmt.Sprint(count), func(t *testing.T) {
			t.Parallel()
			dir := makeCgroup(t, true)
			for range count {
				attach(t, dir, denyAll, unix.BPF_F_ALLOW_MULTI)
			}
			mustAllow(t, sleeper(t, dir), Rule{'c', 195, 7, "rwm"})
			if programs := attached(t, dir); len(programs) != count {
				t.Errorf("programs %v, want %d", programs, count)
			}
			if got := accesses(t, dir, 'c'); got != "mrwb" {
				t.Errorf("access %q", got)
			}
		})
	}
}

func TestShared(t *testing.T) {
	for name, c := range map[string]struct {
		restricted bool
		below      string // the cgroup of the other process
		want       string
	}{
		"another process":                         {true, "", "is also in this cgroup"},
		"another process in a cgroup below":       {true, "below", "is also in this cgroup"},
		"another process without any restriction": {false, "", ""},
	} {
		for _, unified := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s unified %v", name, unified), func(t *testing.T) {
				t.Parallel()
				dir, want := makeCgroup(t, unified), "mrwb"
				if c.restricted {
					restrict(t, dir, unified)
					want = ""
				}
				pid := sleeper(t, dir)
				sleeper(t, makeBelow(t, dir, c.below))
				err := allow(t.Context(), host, pid, gpu)
				if c.want == "" && err != nil ||
					c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
					t.Errorf("error %v, want %q", err, c.want)
				}
				if got := accesses(t, dir, 'c'); got != want {
					t.Errorf("access %q, want %q", got, want)
				}
			})
		}
	}
}

// restrict makes a cgroup deny all devices.
func restrict(t *testing.T, dir string, unified bool) {
	t.Helper()
	if unified {
		attach(t, dir, denyAll, unix.BPF_F_ALLOW_MULTI)
	} else {
		write(t, filepath.Join(dir, "devices.deny"), "a")
	}
}

// TestScope is about the cgroups that crun makes with systemd: the container is below its scope.
func TestScope(t *testing.T) {
	scope := makeBelow(t, makeCgroup(t, true), "crun-1.scope")
	dir := makeBelow(t, scope, "container")
	for _, d := range []string{scope, dir} {
		attach(t, d, denyAll, unix.BPF_F_ALLOW_MULTI)
	}
	pid := sleeper(t, dir)
	mustAllow(t, pid, gpu)
	if got := accesses(t, dir, 'c'); got != "rwb" {
		t.Errorf("access %q", got)
	}
	before := attached(t, scope)
	sleeper(t, makeBelow(t, scope, "other"))
	mustAllow(t, pid, Rule{'c', 195, 8, "rw"})
	if after := attached(t, scope); !slices.Equal(after, before) {
		t.Errorf("a scope with other processes: programs %v, want %v", after, before)
	}
}

func TestProgramsThatCannotBeReplaced(t *testing.T) {
	for name, c := range map[string]struct {
		attach func(t *testing.T, dir string)
		want   string
	}{
		"one with a map":              {attachWithMap, "uses BPF maps"},
		"one that tolerates no other": {attachSingle, "operation not permitted"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := makeCgroup(t, true)
			c.attach(t, dir)
			before := attached(t, dir)
			err := allow(t.Context(), host, sleeper(t, dir), gpu)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want %q", err, c.want)
			}
			if after := attached(t, dir); !slices.Equal(after, before) {
				t.Errorf("programs %v, want %v", after, before)
			}
		})
	}
}

func attachSingle(t *testing.T, dir string) {
	t.Helper()
	attach(t, dir, denyAll, 0)
}

func attachWithMap(t *testing.T, dir string) {
	t.Helper()
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	attach(t, dir, append(asm.Instructions{asm.LoadMapPtr(asm.R2, m.FD())}, denyAll...), unix.BPF_F_ALLOW_MULTI)
}

// TestHardened guards against programs of which the kernel does not show all.
func TestHardened(t *testing.T) {
	for name, c := range map[string]struct {
		value, want string
	}{
		"not hardened":                   {"0\n", ""},
		"hardened for ordinary users":    {"1\n", ""},
		"hardened for root":              {"2\n", "gpu-cdi-runtime"},
		"a kernel without that compiler": {"", ""},
	} {
		t.Run(name, func(t *testing.T) {
			procfs := t.TempDir()
			if c.value != "" {
				if err := os.MkdirAll(filepath.Join(procfs, "sys/net/core"), 0o755); err != nil {
					t.Fatal(err)
				}
				write(t, filepath.Join(procfs, "sys/net/core/bpf_jit_harden"), c.value)
			}
			checkError(t, checkReadable(procfs), c.want)
		})
	}
}

func TestGoneProcess(t *testing.T) {
	cmd := exec.Command("cat")
	input, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	p, err := proc.Open(host.Proc, cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	_ = input.Close()
	_ = cmd.Wait()
	if _, err := Find(host, p); !errors.Is(err, proc.ErrEnded) {
		t.Error(err)
	}
}

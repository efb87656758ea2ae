package devcgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/testenv"
)

// hierarchy returns where the device cgroups of this machine are mounted.
func hierarchy(t *testing.T, unified bool) string {
	t.Helper()
	testenv.Root(t)
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	mounts, err := parseMounts(string(table))
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(mounts, func(m mount) bool { return m.unified == unified && m.root == "/" })
	if i < 0 {
		testenv.Skip(t, "needs both versions of cgroups")
	}
	return mounts[i].point
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

func mustAllow(t *testing.T, pid int, rules ...Rule) *Change {
	t.Helper()
	change, err := Allow(t.Context(), host, pid, rules)
	if err != nil {
		t.Fatal(err)
	}
	return change
}

func mustUndo(t *testing.T, c *Change) {
	t.Helper()
	if err := c.Undo(); err != nil {
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
var denyAll = []instruction{{code: bpfALU64 | bpfMov}, {code: unix.BPF_JMP | bpfExit}}

func attach(t *testing.T, dir string, code []instruction, flags uint32) {
	t.Helper()
	p, err := loadProgram(code)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	// Without the flag of several programs, no program is named as the one to replace.
	if err := attachTo(t, dir, p, flags); err != nil {
		t.Fatal(err)
	}
}

func attachTo(t *testing.T, dir string, p program, flags uint32) error {
	t.Helper()
	f := openDir(t, dir)
	attr := struct{ target, program, attachType, flags, replaced uint32 }{
		uint32(f.Fd()), uint32(p.Fd()), unix.BPF_CGROUP_DEVICE, flags, 0,
	}
	return call(unix.BPF_PROG_ATTACH, &attr)
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

func attached(t *testing.T, dir string) (ids []uint32, flags uint32) {
	t.Helper()
	ids, flags, err := attachedPrograms(openDir(t, dir), 0)
	if err != nil {
		t.Fatal(err)
	}
	return ids, flags
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
				change := mustAllow(t, sleeper(t, dir), rules...)
				if got := accesses(t, dir, c.kind); got != c.want {
					t.Errorf("access %q, want %q", got, c.want)
				}
				mustUndo(t, change)
				if got := accesses(t, dir, c.kind); got != "" {
					t.Errorf("access %q after undo", got)
				}
			})
		}
	}
}

// hardened reports whether what the kernel shows of a program is not what was loaded.
func hardened() bool {
	value, err := os.ReadFile("/proc/sys/net/core/bpf_jit_harden")
	return err == nil && strings.TrimSpace(string(value)) == "2"
}

func TestPrograms(t *testing.T) {
	for name, c := range map[string]struct {
		flags uint32
		count int
	}{
		"one that is alone":         {0, 1},
		"one that can be overruled": {unix.BPF_F_ALLOW_OVERRIDE, 1},
		"one of many":               {unix.BPF_F_ALLOW_MULTI, 1},
		"three":                     {unix.BPF_F_ALLOW_MULTI, 3},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := makeCgroup(t, true)
			for range c.count {
				attach(t, dir, denyAll, c.flags)
			}
			pid := sleeper(t, dir)
			before, _ := attached(t, dir)

			change := mustAllow(t, pid, Rule{'c', 195, 7, "rwm"})
			ids, flags := attached(t, dir)
			if len(ids) != c.count || flags != c.flags {
				t.Errorf("%d programs with flags %d, want %d with %d", len(ids), flags, c.count, c.flags)
			}
			if got := accesses(t, dir, 'c'); got != "mrwb" {
				t.Errorf("access %q", got)
			}
			again := mustAllow(t, pid, Rule{'c', 195, 7, "rwm"})
			if now, _ := attached(t, dir); !slices.Equal(now, ids) && !hardened() {
				t.Errorf("the second call changed programs %v to %v", ids, now)
			}
			mustUndo(t, again)
			mustUndo(t, change)
			after, flags := attached(t, dir)
			if !slices.Equal(after, before) || flags != c.flags {
				t.Errorf("programs %v with flags %d after undo, want %v", after, flags, before)
			}
			if len(change.Notes) != 0 {
				t.Error(change.Notes)
			}
		})
	}
}

// TestList guards what undo denies: the kernel's list is as before, whatever entries overlap.
func TestList(t *testing.T) {
	for _, before := range []string{
		"", "c 195:7 r", "c 195:7 rwm", "c 195:* r", "c *:7 rw", "c 195:* rwm;c 195:7 w", "b 195:7 rw",
	} {
		t.Run(before, func(t *testing.T) {
			t.Parallel()
			dir := makeCgroup(t, false)
			write(t, filepath.Join(dir, "devices.deny"), "a")
			for rule := range strings.SplitSeq(before, ";") {
				if rule != "" {
					write(t, filepath.Join(dir, "devices.allow"), rule)
				}
			}
			list := func() string {
				data, err := os.ReadFile(filepath.Join(dir, "devices.list"))
				if err != nil {
					t.Fatal(err)
				}
				return string(data)
			}
			want, pid := list(), sleeper(t, dir)
			change := mustAllow(t, pid, Rule{'c', 195, 7, "rw"})
			if lacking(list(), Rule{'c', 195, 7, "rw"}) != "" {
				t.Errorf("list without the rule:\n%s", list())
			}
			mustUndo(t, mustAllow(t, pid, Rule{'c', 195, 7, "rw"}))
			mustUndo(t, change)
			if diff := cmp.Diff(want, list()); diff != "" {
				t.Errorf("the list after undo (-before +after):\n%s", diff)
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
		"another process":                         {true, "", "is in it too"},
		"another process in a cgroup below":       {true, "below", "is in it too"},
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
				_, err := Allow(t.Context(), host, pid, []Rule{gpu})
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
	change := mustAllow(t, pid, gpu)
	if got := accesses(t, dir, 'c'); got != "rwb" || len(change.Notes) > 0 {
		t.Errorf("access %q, notes %q", got, change.Notes)
	}
	mustUndo(t, change)
	sleeper(t, makeBelow(t, scope, "other"))
	if change = mustAllow(t, pid, gpu); len(change.Notes) != 1 {
		t.Errorf("a scope with other processes: notes %q", change.Notes)
	}
}

// TestProgramsThatCannotBeReplaced: all programs are as before, and the error says why.
func TestProgramsThatCannotBeReplaced(t *testing.T) {
	for name, c := range map[string]struct {
		attach func(t *testing.T, dir string)
		want   string
	}{
		"a program with a map": {attachWithMap, "uses BPF maps"},
		"a program by a link":  {attachByLink, "BPF link"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := makeCgroup(t, true)
			attach(t, dir, denyAll, unix.BPF_F_ALLOW_MULTI)
			c.attach(t, dir)
			before, _ := attached(t, dir)
			_, err := Allow(t.Context(), host, sleeper(t, dir), []Rule{gpu})
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want %q", err, c.want)
			}
			if after, _ := attached(t, dir); !slices.Equal(after, before) {
				t.Errorf("programs %v, want %v", after, before)
			}
		})
	}
}

func attachWithMap(t *testing.T, dir string) {
	t.Helper()
	attr := struct{ kind, keySize, valueSize, entries, flags uint32 }{unix.BPF_MAP_TYPE_ARRAY, 4, 4, 1, 0}
	fd, err := callFD(unix.BPF_MAP_CREATE, &attr)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(int(fd))
	loadMap := []instruction{
		{code: unix.BPF_LD | unix.BPF_IMM | 0x18, registers: 2 | unix.BPF_PSEUDO_MAP_FD<<4, constant: int32(fd)}, {},
	}
	attach(t, dir, append(loadMap, denyAll...), unix.BPF_F_ALLOW_MULTI)
}

func attachByLink(t *testing.T, dir string) {
	t.Helper()
	p, err := loadProgram(denyAll)
	if err != nil {
		t.Fatal(err)
	}
	attr := struct{ program, target, attachType, flags uint32 }{
		uint32(p.Fd()), uint32(openDir(t, dir).Fd()), unix.BPF_CGROUP_DEVICE, 0,
	}
	fd, err := callFD(unix.BPF_LINK_CREATE, &attr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(int(fd)) })
}

func TestGoneProcess(t *testing.T) {
	cmd := exec.Command("true")
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	if _, err := Allow(t.Context(), host, cmd.Process.Pid, []Rule{gpu}); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}

// TestSpeed fails only if Allow takes as long as a container's start.
func TestSpeed(t *testing.T) {
	dir := makeCgroup(t, true)
	attach(t, dir, denyAll, unix.BPF_F_ALLOW_MULTI)
	pid, start := sleeper(t, dir), time.Now()
	change := mustAllow(t, pid, gpu)
	t.Logf("allow: %v", time.Since(start))
	start = time.Now()
	mustUndo(t, change)
	t.Logf("undo: %v", time.Since(start))
}

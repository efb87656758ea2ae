package doctor

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestMain(m *testing.M) {
	code := m.Run()
	if programDir != "" {
		_ = os.RemoveAll(programDir)
	}
	os.Exit(code)
}

var programDir string

// program builds this program, since findings name its commands, and returns its path.
var program = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "doctor-")
	if err != nil {
		return "", err
	}
	programDir = dir
	path := filepath.Join(dir, "gpu-cdi-plugin")
	if out, err := exec.Command("go", "build", "-o", path, "..").CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the program: %w\n%s", err, out)
	}
	return path, nil
})

// modprobe makes device nodes as the driver's nvidia-modprobe does.
const modprobe = `#!/bin/sh
cd "$(dirname "$0")/../.."
make() { mkdir -p "$(dirname "dev/$1")" && { [ -e "dev/$1" ] || mknod -m 666 "dev/$1" c "$2" "$3"; }; }
case "$*" in
"-c 255") make nvidiactl 195 255 ;;
"-u -c 0")
	mkdir -p sys/module/nvidia_uvm
	make nvidia-uvm 511 0 && make nvidia-uvm-tools 511 1
	;;
-m) make nvidia-modeset 195 254 ;;
"-f "*) minor=$(sed -n 's/DeviceFileMinor: //p' ".$2") && make "nvidia-caps/nvidia-cap$minor" 510 "$minor" ;;
"-c "*) make "nvidia$2" 195 "$2" ;;
esac
`

// systemctl changes which units of the host's files are started. It starts and stops none.
const systemctl = `#!/bin/sh
verb=$1
case "$verb" in
mask | disable | enable | unmask)
	shift
	[ "$1" != --now ] || shift
	SYSTEMD_OFFLINE=1 exec %s --quiet --root=%s "$verb" "$@"
	;;
esac
`

// confined runs one program of a mend, which may only name paths below the simulated host.
const confined = `#!/bin/sh
for word in "$@"; do
	case "$word" in
	%[1]s/*) ;;
	*/* | *..*) echo "$word is not on the simulated host" >&2; exit 126 ;;
	esac
done
exec %[2]s "$@"
`

// mend runs the commands of the findings, in their order, as a user does who copies them into a shell. The shell finds
// only these programs, none of which changes this machine: a fix that needs another one is advice.
func (h *testHost) mend(list []Finding) {
	h.t.Helper()
	bin, root := h.t.TempDir(), wording.Quote(h.node.Root())
	testenv.WriteProgram(h.t, filepath.Join(bin, "gpu-cdi-plugin"),
		[]byte("#!/bin/sh\nPATH="+os.Getenv("PATH")+" exec "+wording.Line(h.command())+" \"$@\"\n"))
	testenv.WriteProgram(h.t, filepath.Join(bin, "systemctl"),
		fmt.Appendf(nil, systemctl, testenv.Command(h.t, "systemctl"), root))
	for _, name := range []string{"rm", "rmdir", "chmod", "chown"} {
		testenv.WriteProgram(h.t, filepath.Join(bin, name), fmt.Appendf(nil, confined, root, testenv.Command(h.t, name)))
	}
	for _, f := range list {
		if !canRun(f.Fix) {
			h.t.Errorf("the mend of %s cannot be run here, so it is advice: %s", f.ID, f.Fix)
			continue
		}
		cmd := exec.CommandContext(h.t.Context(), testenv.Command(h.t, "sh"), "-c", f.Fix)
		cmd.Env = []string{"PATH=" + bin}
		cmd.Dir = h.t.TempDir()
		if out, err := cmd.CombinedOutput(); err != nil {
			h.t.Errorf("the mend of %s fails: %s: %v\n%s", f.ID, f.Fix, err, out)
		}
	}
}

// advice has the findings whose fix is no command that is run here, with the reason.
var advice = map[string]string{
	"driver-missing": installs, "driver-damaged": installs, "driver-files": installs,
	"driver-version": "it reboots the host", "driver-not-loaded": "it loads a kernel module",
	"driver-fails": "the kernel's log has the reason", "driver-link": "it changes the host's libraries",
	"gpu-none": "it changes the machine", "gpu-unreadable": "it resets the GPU",
	"gpu-unbound":           "it writes into sysfs",
	"fabricmanager-missing": service, "persistenced-missing": service,
	"platform": "nothing mends it", "default-devices": configures,
	"config-file": "only the administrator knows what is meant", "service-failed": service, "service-stopped": service,
	"cdi-off": configures, "cdi-unknown": configures, "engine-config": configures, "runtime-nvidia": configures,
	"runtime-missing": configures, "pids-limit": configures, "docker-gpus": "it is another way to start containers",
	"spec-dir": "either directory may be meant", "spec-volatile": service,
	"dir-read-only": chooses, "state-tmpfs": chooses,
	"kubelet-socket": kubelet, "kubelet-stopped": kubelet, "kubelet-root-dir": kubelet, "kubelet-pods": kubelet,
	"kubelet-cdi": kubelet, "plugin-other": kubelet, "plugin-gone": kubelet,
	"selinux": kernel, "inotify": kernel, "cgroup-hybrid": kernel, "cgroup-v1": kernel,
	"dev-char": "it writes into /etc/tmpfiles.d and /dev", "hook-noexec": chooses,
	"unchecked": "what was not read is not known to be wrong",
}

const (
	installs   = "it installs the driver"
	service    = "it starts a service"
	configures = "the engine's configuration is the administrator's"
	chooses    = "only the administrator knows another directory"
	kubelet    = "the kubelet and its plugins are not this program's"
	kernel     = "it changes settings of the kernel"
)

// hasAdvice reports whether a finding is among those with advice.
func hasAdvice(list []Finding) bool {
	return slices.ContainsFunc(list, func(f Finding) bool { return advice[f.ID] != "" })
}

// canRun reports whether a fix has nothing but simple commands of these programs.
func canRun(fix string) bool {
	programs := []string{"gpu-cdi-plugin", "systemctl", "rm", "rmdir", "chmod", "chown"}
	for command := range strings.SplitSeq(fix, "&&") {
		words := strings.Fields(command)
		if len(words) < 2 || !slices.Contains(programs, words[0]) || strings.ContainsAny(command, "<>|&;`$()\n") {
			return false
		}
	}
	return true
}

// command returns this program with the options of the host.
func (h *testHost) command(args ...string) []string {
	h.t.Helper()
	built, err := program()
	testenv.Must(h.t, err)
	hook := "--no-hook"
	if h.options.Hook != "" {
		hook = "--hook-path=" + h.options.Hook
	}
	return append([]string{
		built, "--insecure-paths", "--root=" + h.node.Root(), "--cdi-dir=" + h.options.CDIDir, hook,
	}, args...)
}

// run runs this program on the host.
func (h *testHost) run(args ...string) {
	h.t.Helper()
	proc.Must(h.t, 0, proc.Cmd{Args: h.command(args...)})
}

// faultsOf returns the findings that are more than notes, a line for each.
func faultsOf(list []Finding) string {
	var text strings.Builder
	for _, f := range list {
		if f.IsFault() {
			fmt.Fprintf(&text, "%s: %s: %s\n  mend: %s\n", f.ID, f.Subject, f.Problem, f.Fix)
		}
	}
	return text.String()
}

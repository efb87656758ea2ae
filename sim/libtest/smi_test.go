package libtest

import (
	"errors"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the golden files")

// smi runs nvidia-smi on a node, or without a library if n is nil, and returns its exit status and output.
func smi(t *testing.T, n *node, args ...string) (int, string) {
	t.Helper()
	cmd := exec.Command(filepath.Join(built(t), "nvidia-smi"), args...)
	cmd.Env = append(os.Environ(), "TZ=UTC", "LC_ALL=C")
	if n != nil {
		cmd.Env = append(cmd.Env, "LD_LIBRARY_PATH="+filepath.Dir(n.library))
	}
	out, err := cmd.CombinedOutput()
	var failed *exec.ExitError
	if err != nil && !errors.As(err, &failed) {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), string(out)
}

// clock matches the first line of the summary.
var clock = regexp.MustCompile(`(?m)^(Mon|Tue|Wed|Thu|Fri|Sat|Sun) .*\n`)

// idle is the state in which nothing but a fault keeps GPUs from being reset.
const idle = "set gpu=0 persistence-mode=0\nset gpu=1 persistence-mode=0\nset gpu=2 persistence-mode=0\n" +
	"set gpu=3 persistence-mode=0\n"

// ownProcess matches the number and the name of this process in a summary.
var ownProcess = regexp.MustCompile(`(?m)^(\|  +\d+ +\S+ +\S+) +\d+( +[CG]   ).{36}`)

// TestSMI compares the output of nvidia-smi with golden files.
func TestSMI(t *testing.T) {
	for name, test := range map[string]struct {
		state  string
		args   string
		status int
	}{
		"summary":           {"", "", 0},
		"summary, one lost": {"fault gpu=1 kind=lost\n", "", 15},
		"summary, one busy": {
			"set gpu=0 compute-mode=3\nprocess gpu=0 pid=PID type=compute memory=2147483648\n" +
				"process gpu=3 pid=PID type=graphics memory=1048576 gi=7 ci=0\n", "", 0,
		},
		"list":              {"", "-L", 0},
		"list, long option": {"", "--list-gpus", 0},
		"list, one lost":    {"fault gpu=1 kind=lost\n", "-L", 15},
		"list, one unknown": {"fault gpu=2 function=nvmlDeviceGetHandleByIndex return=999\n", "-L", 255},
		"list, one gone":    {"fault gpu=0 kind=gone\n", "-L", 0},
		"list, none": {
			"fault gpu=0 kind=gone\nfault gpu=1 kind=gone\nfault gpu=2 kind=gone\nfault gpu=3 kind=gone\n", "-L", 6,
		},
		"query": {
			"",
			"--query-gpu=index,uuid,name,pci.bus_id,memory.total,driver_version,mig.mode.current --format=csv", 0,
		},
		"query without more": {"", "--query-gpu=index,memory.total,mig.mode.current --format=csv,noheader,nounits", 0},
		"query of all": {
			"",
			"--query-gpu=gpu_name,gpu_uuid,gpu_bus_id,count,serial,vbios_version,memory.free,memory.used,compute_cap," +
				"temperature.gpu,utilization.gpu,power.draw,power.limit,ecc.errors.uncorrected.volatile.total " +
				"--format=csv", 0,
		},
		"query, one lost":   {"fault gpu=1 kind=lost\n", "--query-gpu=index,uuid --format=csv", 15},
		"query of nonsense": {"", "--query-gpu=index,nonsense --format=csv", 2},
		"query, no format":  {"", "--query-gpu=index", 2},
		"query, wrong form": {"", "--query-gpu=index --format=xml", 2},
		"wrong option":      {"", "--nonsense", 2},
		"reset":             {idle + "set gpu=1 recovery-action=1\n", "--gpu-reset -i 1", 0},
		"reset by UUID":     {idle, "-r --id=GPU-00000001-0000-4000-8000-000000000001", 0},
		"reset by address":  {idle, "-r -i 0000:1b:00.0,0000:43:00.0", 0},
		"reset of all":      {idle, "-r", 0},
		"reset, in use":     {"", "--gpu-reset -i 1", 255},
		"reset, two in use": {"", "--gpu-reset -i 0,1", 255},
		"reset, not supported": {
			"set gpu=1 reset-result=2\n", "--gpu-reset -i 1", 3,
		},
		"reset, needs peers":    {"set gpu=1 reset-result=3\n", "--gpu-reset -i 1", 255},
		"reset, one of two":     {idle + "set gpu=1 reset-result=1\n", "--gpu-reset -i 0,1", 255},
		"reset, lost":           {"fault gpu=1 kind=lost\n", "--gpu-reset -i 1", 15},
		"reset, no such GPU":    {"", "--gpu-reset -i 7", 6},
		"persistence off":       {"", "-pm 0 -i 1", 0},
		"persistence on again":  {"", "--persistence-mode=1 --id=1", 0},
		"persistence, nonsense": {"", "-pm maybe", 2},
		"id alone":              {"", "-i 1", 2},
		"help":                  {"", "--help", 0},
		"driver not loaded":     {"fault function=nvmlInit return=9\n", "", 9},
		"version mismatch":      {"machine kernel=575.57.08\n", "-L", 18},
		"no permission":         {"fault function=nvmlInit return=4\n", "-L", 4},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newTestNode(t)
			n.setState(t, strings.ReplaceAll(test.state, "PID", strconv.Itoa(os.Getpid())))
			status, out := smi(t, n, strings.Fields(test.args)...)
			if status != test.status {
				t.Errorf("exit status %d, want %d", status, test.status)
			}
			out = clock.ReplaceAllString(out, "")
			golden(t, name, ownProcess.ReplaceAllString(out, "${1} PID${2}NAME"))
		})
	}
}

func TestSMIWithoutLibrary(t *testing.T) {
	t.Parallel()
	status, out := smi(t, nil)
	if status != 12 || !strings.HasPrefix(out, "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.") {
		t.Errorf("exit status %d, want 12; printed:\n%s", status, out)
	}
}

// golden compares with testdata/smi/<name>, or writes it with -update.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", "smi", strings.NewReplacer(", ", "-", " ", "-").Replace(name)+".txt")
	if *update {
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755),
			os.WriteFile(path, []byte(got), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("output differs from %s (-want +got):\n%s", path, diff)
	}
}

package nvml

import (
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"
)

// A process can load one NVML library. So a test that loads one runs in a process of its own: the test binary again,
// with this variable naming the test. Such tests run in parallel.
const aloneEnv = "NVML_TEST_ALONE"

// alone reports whether the test is in a process of its own. If it is not, it is run in one before alone returns.
//
//	if !alone(t) {
//		return
//	}
func alone(t *testing.T) bool {
	t.Helper()
	if os.Getenv(aloneEnv) == t.Name() {
		return true
	}
	t.Parallel()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), exe, "-test.v", "-test.count=1", "-test.timeout=2m", "-test.run="+only(t.Name()))
	if *update {
		cmd.Args = append(cmd.Args, "-update")
	}
	cmd.Env = append(os.Environ(), aloneEnv+"="+t.Name())
	out, err := cmd.CombinedOutput()
	switch {
	case err != nil:
		t.Errorf("in a process of its own: %v\n%s", err, out)
	case strings.Contains(string(out), "--- SKIP: "+t.Name()+" "):
		testenv.Skip(t, "in a process of its own: "+string(out))
	case !strings.Contains(string(out), "--- PASS: "+t.Name()+" "):
		t.Errorf("it did not run in a process of its own:\n%s", out)
	}
	return false
}

// only is the pattern for -test.run that matches the test of that name.
func only(name string) string {
	parts := strings.Split(name, "/")
	for i, p := range parts {
		parts[i] = "^" + regexp.QuoteMeta(p) + "$"
	}
	return strings.Join(parts, "/")
}

package dist

import (
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

const units = "../../deploy/units"

var exposure = regexp.MustCompile(`Overall exposure level for \S+: ([0-9.]+)`)

// TestUnitsAreConfined has systemd rate what the units may do, from 0 to 10. The rating does not know what
// TestTheServicesThatAreNotConfined is about.
func TestUnitsAreConfined(t *testing.T) {
	systemd := testenv.Command(t, "systemd-analyze") //nolint:misspell // its name
	for name, most := range map[string]float64{
		"gpu-cdi-watch.service": 1, "gpu-cdi-plugin.service": 2.8, "gpu-cdi-mps@.service": 4,
		"gpu-cdi-mps-shm@.service": 4,
		"device-manager.service":   3.1,
		"gpu-cdi-await.service":    1,
	} {
		r := proc.Must(t, 0, proc.Cmd{
			Args: []string{systemd, "security", "--offline=true", "--no-pager", filepath.Join(units, name)},
		})
		found := exposure.FindStringSubmatch(r.Stdout)
		if found == nil {
			t.Fatalf("no score of %s in %v", name, r)
		}
		score, err := strconv.ParseFloat(found[1], 64)
		testenv.Must(t, err)
		if t.Logf("%s: %.1f", name, score); score > most {
			t.Errorf("%s: %.1f, want at most %.1f", name, score, most)
		}
	}
}

// opening are capabilities by which root can leave each sandbox of a unit, such as by /proc/PID/root.
var opening = regexp.MustCompile(
	`CAP_(SYS_PTRACE|SYS_ADMIN|SYS_MODULE|SYS_RAWIO|DAC_OVERRIDE|DAC_READ_SEARCH|CHOWN|FOWNER)`)

// A unit with such capabilities, or with the sockets of systemd, is not called confined.
func TestTheServicesThatAreNotConfined(t *testing.T) {
	var threat string
	for line := range strings.Lines(string(readFile(t, "../../SECURITY.md"))) {
		if strings.HasPrefix(line, "| the services themselves") {
			threat = line
		}
	}
	confined, others, _ := strings.Cut(threat, "are confined: ")
	for name, isConfined := range map[string]bool{
		"gpu-cdi-watch.service": true, "gpu-cdi-mps@.service": true,
		"gpu-cdi-plugin.service": false, "device-manager.service": false,
	} {
		text := string(readFile(t, units, name))
		opens := opening.MatchString(regexp.MustCompile(`(?m)^CapabilityBoundingSet=.*$`).FindString(text)) ||
			!regexp.MustCompile(`(?m)^TemporaryFileSystem=/run(/systemd)?:ro$`).MatchString(text)
		if opens == isConfined {
			t.Errorf("%s is confined: %t, want %t", name, !opens, isConfined)
		}
		if is := strings.Contains(confined, name); is != isConfined || is == strings.Contains(others, name) {
			t.Errorf("SECURITY.md says that %s is confined: %t", name, is)
		}
	}
}

// TestUnitsRunNoShellAsRoot reads the commands that a unit runs outside its sandbox (+). A shell and mount(8) follow
// links that the unit's program can make, and bind mounts of the unit (BindPaths=) apply to such a command too.
func TestUnitsRunNoShellAsRoot(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(units, "*.service"))
	testenv.Must(t, err)
	for _, file := range files {
		text := string(readFile(t, file))
		for _, command := range regexp.MustCompile(`(?m)^Exec\w+=[-@:!]*\+[-@:!]*(.*)$`).FindAllStringSubmatch(text, -1) {
			// The service can write to nothing above the directory that mkdir makes.
			harmless := strings.HasPrefix(command[1], "/usr/bin/gpu-cdi-plugin ") ||
				strings.HasPrefix(command[1], "systemctl stop ") ||
				command[1] == "mkdir -p -m 750 /var/lib/kubelet/device-plugins"
			if strings.Contains(text, "\nBindPaths=") || !harmless {
				t.Errorf("%s runs without its sandbox: %s", filepath.Base(file), command[1])
			}
		}
	}
}

// TestSystemdAcceptsTheUnits reads what systemd prints, since it exits with 0 for unknown keys too.
func TestSystemdAcceptsTheUnits(t *testing.T) {
	systemd := testenv.Command(t, "systemd-analyze") //nolint:misspell // its name
	dir := t.TempDir()
	var files []string
	for _, name := range []string{
		"gpu-cdi-watch.service", "gpu-cdi-plugin.service", "gpu-cdi-plugin.path", "gpu-cdi-mps@.service",
		"gpu-cdi-mps-shm@.service",
		"gpu-cdi-await.service",
		"device-manager.service", "device-manager.socket", "device-manager-leases.socket",
	} {
		text := readFile(t, units, name)
		name = strings.Replace(name, "@", "@GPU-8f6c3a1e-0000-4000-8000-000000000001", 1)
		// The program of a unit must exist.
		changed := strings.NewReplacer("/usr/bin/gpu-cdi-plugin", "/bin/true", "/usr/bin/device-manager", "/bin/true").
			Replace(string(text))
		testenv.Must(t, os.WriteFile(filepath.Join(dir, name), []byte(changed), 0o644))
		files = append(files, filepath.Join(dir, name))
	}
	r := proc.Must(t, 0, proc.Cmd{Args: append([]string{systemd, "verify", "--man=no"}, files...)})
	if r.Stdout+r.Stderr != "" {
		t.Errorf("systemd says of the units: %v", r)
	}
}

package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gpu-cdi-plugin/test/lib/testenv"
)

// logPolicy makes a directory with a policy that has the log at a path in it, and returns both.
func logPolicy(t *testing.T) (dir, log string) {
	t.Helper()
	dir = t.TempDir()
	log = filepath.Join(dir, "logs/hook.log")
	testenv.Must(t, os.Mkdir(filepath.Dir(log), 0o755))
	testenv.Must(t, os.WriteFile(filepath.Join(dir, "hook.yaml"), fmt.Appendf(nil, "log: %s\n", log), 0o644))
	return dir, log
}

// A log on a file system that does not respond holds up no container.
func TestALogThatHangs(t *testing.T) {
	for name, hangs := range map[string]bool{"a log": false, "a log that hangs": true} {
		t.Run(name, func(t *testing.T) {
			c := newContainer(t)
			dir, log := logPolicy(t)
			if hangs {
				mountSilent(t, filepath.Dir(log))
			}
			c.write("/a/file", "")
			hook, err := exec.LookPath(hookName)
			testenv.Must(c.t, err)
			cmd := exec.Command(hook, "create-container", "--link=/a/file/link::target")
			cmd.Dir, cmd.Env = c.root, append(os.Environ(), "NODE="+dir)
			cmd.Stdin = strings.NewReader(fmt.Sprintf(`{"id":"test","bundle":%q}`, c.bundle))
			var stderr bytes.Buffer
			cmd.Stderr = &stderr
			begin := time.Now()
			if err := cmd.Run(); err != nil || time.Since(begin) > deadline {
				t.Errorf("after %v: %v", time.Since(begin), err)
			}
			if !strings.Contains(stderr.String(), "/a/file") ||
				strings.Contains(stderr.String(), "write to the log: not done after 500ms") != hangs {
				t.Errorf("%s", &stderr)
			}
			if !hangs {
				checkLog(t, log, `level=warning position=create-container container="test" msg="`, "/a/file")
			}
		})
	}
}

// checkLog fails the test unless the log has one line, with these texts.
func checkLog(t *testing.T, path string, want ...string) {
	t.Helper()
	data, err := os.ReadFile(path)
	testenv.Must(t, err)
	for _, text := range want {
		if bytes.Count(data, []byte("\n")) != 1 || !bytes.Contains(data, []byte(text)) {
			t.Errorf("the log is %q, want one line with %q", data, text)
		}
	}
}

// In the position of the createContainer hook the host's directories are still there: its policy is read, and its log
// is written.
func TestEnginesHooksLog(t *testing.T) {
	for _, e := range engines(t) {
		t.Run(e.name, func(t *testing.T) {
			b := newBundle(t)
			useStaticImage(b)
			dir, log := logPolicy(t)
			etc := filepath.Join(dir, "etc")
			testenv.Must(t, os.MkdirAll(filepath.Join(etc, "gpu-cdi-plugin"), 0o755))
			testenv.Must(t, os.Rename(filepath.Join(dir, "hook.yaml"), filepath.Join(etc, "gpu-cdi-plugin/hook.yaml")))
			b.setup = "mount -n -t overlay -o lowerdir=" + etc + ":/etc overlay /etc"
			// The image has a policy of its own, which is none.
			testenv.Must(t, os.MkdirAll(filepath.Join(b.root(), "etc/gpu-cdi-plugin"), 0o755))
			testenv.Must(
				t,
				os.WriteFile(
					filepath.Join(b.root(), "etc/gpu-cdi-plugin/hook.yaml"),
					[]byte("log: /etc/owned\n"),
					0o644,
				),
			)
			b.args.Links[0].Path = "/bin/busybox/link"
			out, stderr, err := b.run(e)
			if out != "ran" || err != nil {
				t.Errorf("%q, %v: %s", out, err, stderr)
			}
			checkLog(t, log, `level=warning position=create-container container="prestart-hook-test-`, "/bin/busybox")
		})
	}
}

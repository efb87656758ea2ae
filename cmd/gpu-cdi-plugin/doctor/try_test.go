package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/test/lib/testenv"
)

// fakeEngine puts a program in PATH that records its arguments and does what a script says for "run". It returns the
// file with the arguments.
func fakeEngine(t *testing.T, name, load, run string) (log, hook string) {
	t.Helper()
	dir := t.TempDir()
	log, hook = filepath.Join(dir, "log"), filepath.Join(dir, "prestart-hook")
	script := fmt.Sprintf("#!/bin/sh\necho \"$*\" >> %s\ncase $1 in\nload) cat > %s/archive; %s ;;\nrun) %s ;;\nesac\n",
		log, dir, load, run)
	testenv.WriteProgram(t, filepath.Join(dir, name), []byte(script))
	testenv.Must(t, os.WriteFile(hook, []byte("program"), 0o755))
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	return log, hook
}

func TestTry(t *testing.T) {
	for name, c := range map[string]struct {
		engine, load, run string
		want              []string // IDs and problems
	}{
		"a container that has all": {"podman", "true", `echo '{"problems": []}'`, nil},
		"a container that lacks something": {
			"docker", "true", `echo '{"problems": [{"subject": "/dev/nvidia0", "problem": "EPERM", "fix": "give it"}]}'; exit 4`,
			[]string{"try-differs: /dev/nvidia0 in the container: EPERM"},
		},
		"a container in which four nodes have one problem": {
			"docker", "true",
			`for n in 0 1 2 3; do set -- "$@" "{\"subject\": \"/dev/nvidia$n\", \"problem\": \"EPERM\", \"fix\": ` +
				`\"gpu-cdi-plugin doctor on the host\"},"; done; shift "$(($# - 4))"; echo "{\"problems\": [$* ` +
				`{\"subject\": \"libcuda\", \"problem\": \"absent\"}]}"`,
			[]string{
				"try-differs: /dev/nvidia0, /dev/nvidia1, /dev/nvidia2 and 1 more in the container: EPERM",
				"try-differs: libcuda in the container: absent",
			},
		},
		"an engine that refuses": {
			"nerdctl", "true", "echo warning >&2; echo 'no such device' >&2; exit 125", []string{"try-failed: no such device"},
		},
		"an engine that refuses and names its help": {
			"docker", "true",
			"echo 'docker: no such device' >&2; echo >&2; echo \"Run 'docker run --help' for more\" >&2; exit 125",
			[]string{"try-failed: docker: no such device"},
		},
		"an image that cannot be loaded": {
			"podman", "echo 'no space' >&2; exit 1", "true", []string{"try-failed: the image cannot be loaded: no space"},
		},
		"a container that prints nothing": {"podman", "true", "true", []string{"try-failed: unexpected end of JSON input"}},
		"a container that prints something else": {
			"podman", "true", "echo hello",
			[]string{"try-failed: invalid character 'h' looking for beginning of value"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			log, hook := fakeEngine(t, c.engine, c.load, c.run)
			list, err := Try(t.Context(), TryOptions{Engine: c.engine, Device: "nvidia.com/gpu=all", Hook: hook})
			testenv.Must(t, err)
			var got []string
			for _, f := range list {
				got = append(got, f.ID+": "+f.Problem)
				if strings.Contains(f.Fix, "doctor") {
					t.Errorf("it names itself: %s", f.Fix)
				}
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Error(diff)
			}
			lines := linesOf(t, log)
			last := fmt.Sprintf("rmi --force localhost/gpu-cdi-try-%d:try", os.Getpid())
			if lines[len(lines)-1] != last || !strings.HasPrefix(lines[len(lines)-2], "rm --force") {
				t.Errorf("the container and its image are not removed: %q", lines)
			}
		})
	}
}

func TestTryCRI(t *testing.T) {
	dir := t.TempDir()
	log, hook := filepath.Join(dir, "log"), filepath.Join(dir, "prestart-hook")
	testenv.Must(t, os.WriteFile(hook, []byte("program"), 0o755))
	ctr := fmt.Appendf(nil, "#!/bin/sh\necho ctr $* >> %s; cat > /dev/null\n", log)
	testenv.WriteProgram(t, filepath.Join(dir, "ctr"), ctr)
	testenv.WriteProgram(t, filepath.Join(dir, "crictl"), fmt.Appendf(nil, `#!/bin/sh
echo "$*" >> %s
case $1 in
version) echo 'RuntimeName:  containerd' ;;
runp) cat "$2" > %[2]s/pod; echo pod-id ;;
create) cat "$4" > %[2]s/container; echo container-id ;;
logs) echo '{"problems": []}' ;;
pods) echo pod-id ;;
esac
`, log, dir))
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	list, err := Try(t.Context(), TryOptions{Engine: "crictl", Device: "nvidia.com/gpu=0", Hook: hook})
	if err != nil || len(list) > 0 {
		t.Fatalf("got %+v, %v", list, err)
	}
	var verbs []string
	for _, line := range linesOf(t, log) {
		verbs = append(verbs, strings.Fields(line)[0])
	}
	if diff := cmp.Diff(strings.Fields("version ctr runp create start logs pods rmp rmi"), verbs); diff != "" {
		t.Error(diff)
	}
	for file, wants := range map[string][]string{
		"pod":       {`"namespace_options":{"network":2,"pid":1}`},
		"container": {`"namespace_options":{"network":2,"pid":1}`, `"CDI_devices":[{"name":"nvidia.com/gpu=0"}]`},
	} {
		data, err := os.ReadFile(filepath.Join(dir, file))
		testenv.Must(t, err)
		for _, want := range wants {
			if !strings.Contains(string(data), want) {
				t.Errorf("want %s in the %s: %s", want, file, data)
			}
		}
	}
}

func linesOf(t *testing.T, file string) []string {
	t.Helper()
	data, err := os.ReadFile(file)
	testenv.Must(t, err)
	return strings.Split(strings.TrimSpace(string(data)), "\n")
}

func TestAContainerThatNeverEndsIsRemoved(t *testing.T) {
	log, hook := fakeEngine(t, "podman", "true", "echo started; exec sleep 1000")
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		testenv.Eventually(t, "the run of the container", func() bool {
			data, _ := os.ReadFile(log)
			return strings.Contains(string(data), "\nrun ")
		})
		cancel()
	}()
	list, err := Try(ctx, TryOptions{Engine: "podman", Device: "nvidia.com/gpu=all", Hook: hook})
	if err != nil || len(list) != 1 || list[0].ID != "try-failed" {
		t.Errorf("got %+v, %v", list, err)
	}
	if lines := linesOf(t, log); !strings.HasPrefix(lines[len(lines)-2], "rm --force gpu-cdi-try-") {
		t.Errorf("the container is not removed: %q", lines)
	}
}

func TestTheOutputOfAnEngineIsBounded(t *testing.T) {
	tried := &try{engine: "podman"}
	out, err := tried.execute(t.Context(), "head", nil, "-c", fmt.Sprint(2*maxOutput), "/dev/zero")
	if err != nil || len(out) != maxOutput {
		t.Errorf("got %d bytes, %v", len(out), err)
	}
}

func TestNothingIsTriedWithoutTheEngine(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	_, err := Try(t.Context(), TryOptions{Engine: "docker", Hook: "/bin/true"})
	if !errors.Is(err, ErrNoEngine) {
		t.Errorf("got %v", err)
	}
}

func TestTheImageHasOnlyTheProgram(t *testing.T) {
	first, err := imageArchive("localhost/a:try", []byte("program"))
	testenv.Must(t, err)
	second, err := imageArchive("localhost/a:try", []byte("program"))
	if err != nil || string(first) != string(second) {
		t.Error("two archives of one program differ")
	}
}

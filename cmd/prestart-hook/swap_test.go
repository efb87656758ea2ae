package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/hooktest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// Who owns the directory that a root is in can put a link to any other mount in its place while the container starts.
func TestEnginesWhereTheRootIsSwappedForALink(t *testing.T) {
	for _, e := range engines(t) {
		t.Run(e.name, func(t *testing.T) {
			b := newBundle(t)
			hooktest.GlibcRoot(t, b.root())
			victim := filepath.Join(t.TempDir(), "victim")
			must(t, os.Mkdir(victim, 0o700))
			hooktest.MountPoint(t, victim)
			hooktest.GlibcRoot(t, victim)
			before := hooktest.Hash(t, victim)
			must(t, os.Lchown(b.dir, 1000, 1000))
			waits, swapped := filepath.Join(b.dir, "waits"), filepath.Join(b.dir, "swapped")
			b.first = fmt.Sprintf("touch %s; until [ -e %s ]; do sleep 0.01; done", waits, swapped)
			done := make(chan error, 1)
			go func() { done <- swap(b, waits, swapped, victim) }()
			stdout, stderr, err := b.run(e)
			must(t, <-done)
			if hooktest.Hash(t, victim) != before {
				t.Errorf("the hook changed another mount: %v: %s %s", err, stdout, stderr)
			}
		})
	}
}

// swap puts a link to victim in the place of the root when the first hook waits, as an ordinary user would.
func swap(b *bundle, waits, swapped, victim string) error {
	for late := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		if _, err := os.Stat(waits); err == nil {
			break
		}
		if time.Now().After(late) {
			return errors.New("the container's first hook did not run")
		}
	}
	return errors.Join(os.Rename(b.root(), b.root()+".moved"), os.Symlink(victim, b.root()), os.Lchown(b.root(), 1000, 1000),
		os.WriteFile(swapped, nil, 0o600))
}

// Links on the way to the root are followed only if they are root's. The working directory of a runtime that sets it to
// the root counts more than the path.
func TestLinksToTheRoot(t *testing.T) {
	needRoot(t)
	for name, tc := range map[string]struct {
		owner    int
		state    string // of LINK, ROOT and BUNDLE
		dir      string // the working directory
		says     string
		inRoot   bool // the root that is changed, and not what the link leads to
		anything bool
	}{
		"the state's root is another user's link":       {owner: 1000, state: `{"id":"x","root":"LINK"}`, dir: "/", says: "is not followed"},
		"config.json's root is another user's link":     {owner: 1000, state: `{"id":"x","bundle":"BUNDLE"}`, dir: "BUNDLE", says: "is not followed"},
		"the state's root is root's link":               {state: `{"id":"x","root":"LINK"}`, dir: "/", anything: true},
		"the working directory is the container's root": {owner: 1000, state: `{"id":"x","bundle":"BUNDLE"}`, dir: "ROOT", inRoot: true, anything: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			root, other, bundle, link := filepath.Join(dir, "root"), filepath.Join(dir, "other"), filepath.Join(dir, "bundle"), filepath.Join(dir, "users", "link")
			for _, d := range []string{root, other, bundle, filepath.Dir(link)} {
				must(t, os.Mkdir(d, 0o755))
			}
			must(t, os.Symlink(other, link))
			must(t, errors.Join(os.Lchown(filepath.Dir(link), tc.owner, tc.owner), os.Lchown(link, tc.owner, tc.owner)))
			must(t, os.WriteFile(filepath.Join(bundle, "config.json"), fmt.Appendf(nil, `{"root":{"path":%q}}`, link), 0o600))
			paths := strings.NewReplacer("LINK", link, "ROOT", root, "BUNDLE", bundle)
			cmd := exec.Command(testenv.Command(t, "unshare"), "--mount", "sh", "-ec",
				`for d in "$1" "$2"; do mount --bind "$d" "$d"; done; cd "$3"; shift 3; exec "$@"`, "sh", root, other, paths.Replace(tc.dir),
				hookBinary(t), "create-container", "--link=/made::target")
			cmd.Stdin = strings.NewReader(paths.Replace(tc.state))
			out, err := cmd.CombinedOutput()
			isIn := func(dir string) bool {
				var st unix.Stat_t
				return unix.Lstat(filepath.Join(dir, "made"), &st) == nil
			}
			if isIn(root) != tc.inRoot || isIn(other) != (tc.anything && !tc.inRoot) || !strings.Contains(string(out), tc.says) {
				t.Errorf("changed the root: %t, the link's target: %t: %v: %s", isIn(root), isIn(other), err, out)
			}
		})
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

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

	testimage "gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/testenv"
)

// The owner of the directory above a root can replace the root by a link to any mount while the container starts.
func TestEnginesDoNotFollowALinkInTheRootsPlace(t *testing.T) {
	for _, e := range engines(t) {
		t.Run(e.name, func(t *testing.T) {
			b := newBundle(t)
			testimage.GlibcRoot(t, b.root())
			victim := filepath.Join(t.TempDir(), "victim")
			testenv.Must(t, os.Mkdir(victim, 0o700))
			testenv.MountPoint(t, victim)
			testimage.GlibcRoot(t, victim)
			before := testimage.Fingerprint(t, victim)
			testenv.Must(t, os.Lchown(b.dir, 1000, 1000))
			waits, swapped := filepath.Join(b.dir, "waits"), filepath.Join(b.dir, "swapped")
			b.first = fmt.Sprintf("touch %s; until [ -e %s ]; do sleep 0.01; done", waits, swapped)
			done := make(chan error, 1)
			go func() { done <- swapRoot(b, waits, swapped, victim) }()
			stdout, stderr, err := b.run(e)
			testenv.Must(t, <-done)
			if testimage.Fingerprint(t, victim) != before {
				t.Errorf("the hook changed another mount: %v: %s %s", err, stdout, stderr)
			}
		})
	}
}

// swapRoot replaces the root by a link to victim, as an unprivileged user, while the bundle's first hook waits.
func swapRoot(b *bundle, waits, swapped, victim string) error {
	for late := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		if _, err := os.Stat(waits); err == nil {
			break
		}
		if time.Now().After(late) {
			return errors.New("the container's first hook did not run")
		}
	}
	return errors.Join(os.Rename(b.root(), b.root()+".moved"), os.Symlink(victim, b.root()),
		os.Lchown(b.root(), 1000, 1000), os.WriteFile(swapped, nil, 0o600))
}

// The working directory is preferred to the path of config.json, if the runtime has set it to the root.
func TestOnlyLinksOfRootAreFollowedToTheRoot(t *testing.T) {
	needRoot(t)
	for name, tc := range map[string]struct {
		owner   int    // of LINK, which leads to OTHER
		state   string // the OCI state
		dir     string // the working directory
		changed string // empty for an error
	}{
		"the state's root is another user's link": {owner: 1000, state: `{"id":"x","root":"LINK"}`, dir: "/"},
		"config.json's root is another user's link": {
			owner: 1000, state: `{"id":"x","bundle":"BUNDLE"}`, dir: "BUNDLE",
		},
		"the state's root is root's link": {
			state: `{"id":"x","root":"LINK"}`, dir: "/", changed: "OTHER",
		},
		"the working directory is the container's root": {
			owner: 1000, state: `{"id":"x","bundle":"BUNDLE"}`, dir: "ROOT", changed: "ROOT",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			root, other, bundle := filepath.Join(dir, "root"), filepath.Join(dir, "other"), filepath.Join(dir, "bundle")
			link := filepath.Join(dir, "users", "link")
			for _, d := range []string{root, other, bundle, filepath.Dir(link)} {
				testenv.Must(t, os.Mkdir(d, 0o755))
			}
			testenv.Must(t, os.Symlink(other, link))
			testenv.Must(t,
				os.Lchown(filepath.Dir(link), tc.owner, tc.owner), os.Lchown(link, tc.owner, tc.owner))
			config := fmt.Appendf(nil, `{"root":{"path":%q}}`, link)
			testenv.Must(t, os.WriteFile(filepath.Join(bundle, "config.json"), config, 0o600))
			paths := strings.NewReplacer("LINK", link, "ROOT", root, "BUNDLE", bundle)
			cmd := exec.Command(testenv.Command(t, "unshare"), "--mount", "sh", "-ec",
				`for d in "$1" "$2"; do mount --bind "$d" "$d"; done; cd "$3"; shift 3; exec "$@"`,
				"sh", root, other, paths.Replace(tc.dir),
				hookBinary(t), "create-container", "--link=/made::target")
			cmd.Stdin = strings.NewReader(paths.Replace(tc.state))
			out, err := cmd.CombinedOutput()
			changed := ""
			for name, dir := range map[string]string{"ROOT": root, "OTHER": other} {
				if _, err := os.Lstat(filepath.Join(dir, "made")); err == nil {
					changed += name
				}
			}
			if changed != tc.changed || strings.Contains(string(out), "is not followed") != (tc.changed == "") {
				t.Errorf("changed %q, want %q: %v: %s", changed, tc.changed, err, out)
			}
		})
	}
}

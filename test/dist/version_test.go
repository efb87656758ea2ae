package dist

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// tree is a tree of sources of which scripts/version prints the version.
type tree struct {
	t   *testing.T
	dir string
}

// newTree makes a tree without a repository. Its next release is 0.1.0.
func newTree(t *testing.T, dir string) tree {
	t.Helper()
	testenv.Must(t, os.MkdirAll(filepath.Join(dir, "scripts"), 0o755))
	image.CopyFile(t, "../../scripts/version", filepath.Join(dir, "scripts/version"))
	image.CopyFile(t, "../../Makefile", filepath.Join(dir, "Makefile"))
	tr := tree{t, dir}
	tr.next("0.1.0")
	return tr
}

// newRepository makes a tree with a repository of two commits.
func newRepository(t *testing.T) tree {
	t.Helper()
	tr := newTree(t, t.TempDir())
	tr.run("git", "init", "--quiet")
	tr.commit()
	tr.commit()
	return tr
}

func (tr tree) run(args ...string) string {
	tr.t.Helper()
	env := append(withoutMake(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null",
		"GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@example.com", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@example.com",
		fmt.Sprintf("GIT_COMMITTER_DATE=%d +0000", date))
	return proc.Must(tr.t, 0, proc.Cmd{Dir: tr.dir, Env: env, Args: args}).Stdout
}

// next writes the next release into VERSION.
func (tr tree) next(number string) {
	tr.t.Helper()
	testenv.Must(tr.t, os.WriteFile(filepath.Join(tr.dir, "VERSION"), []byte(number+"\n"), 0o644))
}

// commit commits all files.
func (tr tree) commit() {
	tr.t.Helper()
	tr.run("git", "add", ".")
	tr.run("git", "commit", "--quiet", "--allow-empty", "--message", "a change")
}

// version returns what scripts/version prints.
func (tr tree) version() string {
	tr.t.Helper()
	return strings.TrimSpace(tr.run("scripts/version"))
}

func TestVersion(t *testing.T) {
	t.Parallel()
	testenv.Command(t, "git")
	testenv.Command(t, "make")
	for name, c := range map[string]struct {
		make func(t *testing.T) tree
		want string // a pattern, of the version or of the error
		code int
	}{
		"a commit without a tag": {newRepository, `^0\.1\.0-2\.g[0-9a-f]{12}$`, 0},
		"with a changed file": {func(t *testing.T) tree {
			tr := newRepository(t)
			testenv.Must(t, os.WriteFile(filepath.Join(tr.dir, "Makefile"), nil, 0o644))
			return tr
		}, `^0\.1\.0-2\.g[0-9a-f]{12}\.dirty$`, 0},
		"at the tag": {func(t *testing.T) tree {
			tr := newRepository(t)
			tr.run("git", "tag", "--annotate", "--message", "release", "v0.1.0")
			return tr
		}, `^0\.1\.0$`, 0},
		"before the tag": {func(t *testing.T) tree {
			tr := newRepository(t)
			tr.run("git", "tag", "v0.1.0")
			tr.run("git", "checkout", "--quiet", "HEAD~")
			return tr
		}, `^0\.1\.0-1\.g`, 0},
		"at the tag, in a shallow clone": {func(t *testing.T) tree {
			tr := newRepository(t)
			tr.run("git", "tag", "v0.1.0")
			return shallow(tr)
		}, `^0\.1\.0$`, 0},
		"after the tag of the version that comes next": {func(t *testing.T) tree {
			tr := newRepository(t)
			tr.run("git", "tag", "v0.1.0")
			tr.commit()
			return tr
		}, `0\.1\.0 is released \(tag v0\.1\.0\).*Write the next version into VERSION`, 1},
		"in a shallow clone": {func(t *testing.T) tree {
			return shallow(newRepository(t))
		}, `this clone is shallow.*Run: git fetch --unshallow --tags`, 1},
		"without a repository": {func(t *testing.T) tree {
			return newTree(t, t.TempDir())
		}, `no git repository is in .*make dist RELEASE=0\.1\.0`, 1},
		"below another repository": {func(t *testing.T) tree {
			tr := newRepository(t)
			return newTree(t, filepath.Join(tr.dir, "below"))
		}, `no git repository is in .*/below, `, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tr := c.make(t)
			r := proc.Must(t, c.code, proc.Cmd{Args: []string{filepath.Join(tr.dir, "scripts/version")}, Dir: "/"})
			if got := r.Stdout + r.Stderr; !regexp.MustCompile(c.want).MatchString(strings.TrimSpace(got)) {
				t.Errorf("got %q, want %q", got, c.want)
			}
			if c.code == 0 {
				return
			}
			// It can be built, and no release is made; one that is there stays.
			build := tr.run("make", "--dry-run", "build")
			if want := "-X main.version=0.1.0-unknown "; !strings.Contains(build, want) {
				t.Errorf("make build does not have %q:\n%s", want, build)
			}
			release := filepath.Join(tr.dir, "dist/SHA256SUMS")
			testenv.Must(t, os.MkdirAll(filepath.Dir(release), 0o755), os.WriteFile(release, nil, 0o644))
			made := proc.Must(t, 2, proc.Cmd{Args: []string{"make", "dist"}, Dir: tr.dir, Env: withoutMake()})
			if !regexp.MustCompile(c.want).MatchString(made.Stderr) {
				t.Errorf("make dist: %v, want %q", made, c.want)
			}
			readFile(t, release)
		})
	}
}

// shallow returns a clone of the last commit.
func shallow(tr tree) tree {
	tr.t.Helper()
	clone := tree{tr.t, tr.t.TempDir()}
	tr.run("git", "clone", "--quiet", "--depth=1", "file://"+tr.dir, clone.dir)
	return clone
}

// TestSlowVersionsGrow has packages and charts of one commit after the other compared by dpkg, rpm and helm.
func TestSlowVersionsGrow(t *testing.T) {
	dpkg, rpm := testenv.Command(t, "dpkg"), testenv.Command(t, "rpm")
	tr := newTree(t, t.TempDir())
	tr.run("git", "init", "--quiet")
	var versions []string
	for range 11 { // 10 commits are more than 9
		tr.commit()
		versions = append(versions, tr.version())
	}
	tr.run("git", "tag", "v0.1.0")
	versions = append(versions, tr.version())
	tr.next("0.2.0")
	tr.commit()
	versions = append(versions, tr.version())

	dir := t.TempDir()
	var debs, rpms []string
	for _, version := range versions {
		deb, rpmFile := newPackage(t, dir, "deb", "a", version, ""), newPackage(t, dir, "rpm", "a", version, "")
		debs = append(debs, proc.Must(t, 0, proc.Cmd{
			Args: []string{"dpkg-deb", "--field", deb, "Version"},
		}).Stdout)
		rpms = append(rpms, proc.Must(t, 0, proc.Cmd{Args: []string{
			rpm, "--dbpath", dir, "--query", "--nosignature", "--queryformat", "%{VERSION}-%{RELEASE}",
			"--package", rpmFile,
		}}).Stdout)
		chart := filepath.Join(dir, "chart")
		testenv.Must(t, os.MkdirAll(chart, 0o755), os.WriteFile(filepath.Join(chart, "Chart.yaml"),
			[]byte("apiVersion: v2\nname: gpus\nversion: "+version+"\n"), 0o644))
		helm(t, 0, "package", chart, "--destination", filepath.Join(dir, "charts"))
	}
	if want := regexp.MustCompile(`^0\.1\.0~1\.g[0-9a-f]{12}$`); !want.MatchString(strings.TrimSpace(debs[0])) {
		t.Errorf("the first deb has the version %s, want %s", debs[0], want)
	}
	for i := range len(versions) - 1 {
		proc.Must(t, 0, proc.Cmd{
			Args: []string{dpkg, "--compare-versions", strings.TrimSpace(debs[i]), "lt", strings.TrimSpace(debs[i+1])},
		})
		r := proc.Must(t, 0, proc.Cmd{
			Args: []string{rpm, "--eval", fmt.Sprintf("%%{lua:print(rpm.vercmp(%q, %q))}", rpms[i], rpms[i+1])},
		})
		if strings.TrimSpace(r.Stdout) != "-1" {
			t.Errorf("rpm: %s is not before %s: %v", rpms[i], rpms[i+1], r)
		}
	}
	// The index has the highest version first.
	helm(t, 0, "repo", "index", filepath.Join(dir, "charts"))
	var sorted []string
	for _, match := range regexp.MustCompile(`(?m)^    version: (.*)$`).FindAllStringSubmatch(
		string(readFile(t, dir, "charts/index.yaml")), -1) {
		sorted = append(sorted, match[1])
	}
	slices.Reverse(sorted)
	if diff := cmp.Diff(versions, sorted); diff != "" {
		t.Errorf("helm sorts charts (-want +got):\n%s", diff)
	}
}

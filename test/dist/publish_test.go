package dist

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io/fs"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/test/lib/guide"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/suite"
	"gpu-cdi-plugin/test/lib/testenv"
)

// buildTools builds nfpm and tools/dist, and returns their directory.
var buildTools = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp(tempDir, "tools-")
	if err != nil {
		return "", err
	}
	_, err = proc.Output(context.Background(), "go", "build", "-C", "../../tools/dist", "-o", dir+"/", ".",
		"github.com/goreleaser/nfpm/v2/cmd/nfpm")
	return dir, err
})

// tool returns the path of nfpm or of tools/dist.
func tool(t *testing.T, name string) string {
	t.Helper()
	dir, err := buildTools()
	testenv.Must(t, err)
	return filepath.Join(dir, name)
}

// newPackage makes a package of amd64 without files, and returns its path. More is what its description for nfpm also
// has.
func newPackage(t *testing.T, dir, format, name, version, more string) string {
	t.Helper()
	config := filepath.Join(t.TempDir(), "package.yaml")
	text := fmt.Sprintf("name: %s\narch: amd64\nmaintainer: a\nversion: %s\n%s", name, version, more)
	testenv.Must(t, os.WriteFile(config, []byte(text), 0o644))
	made := proc.Must(t, 0, proc.Cmd{
		Args: []string{tool(t, "nfpm"), "package", "--config", config, "--packager", format, "--target", dir},
	})
	_, path, _ := strings.Cut(strings.TrimSpace(made.Stdout), "created package: ")
	return path
}

// smallRelease makes a directory like that of make dist, with a deb, an rpm, an image and a chart that have nothing in
// them, and returns its path.
func smallRelease(t *testing.T, version string) string {
	t.Helper()
	dir, content := t.TempDir(), t.TempDir()
	for _, format := range []string{"deb", "rpm"} {
		newPackage(t, dir+"/", format, "gpu-cdi-plugin", version, "")
	}
	for name, text := range map[string]string{
		"image/launcher":            "",
		"gpu-cdi-plugin/Chart.yaml": "apiVersion: v2\nname: gpu-cdi-plugin\nversion: " + version + "\ndescription: GPUs\n",
	} {
		path := filepath.Join(content, name)
		testenv.Must(t, os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o755))
	}
	proc.Must(t, 0, proc.Cmd{
		Args: []string{
			tool(t, "dist"), "image", "--out", filepath.Join(dir, "gpu-cdi-plugin_"+version+"_image.tar"),
			"--version", version, "amd64=" + filepath.Join(content, "image"),
		},
		Env: append(os.Environ(), fmt.Sprintf("SOURCE_DATE_EPOCH=%d", date)),
	})
	proc.Must(t, 0, proc.Cmd{Args: []string{
		"tar", "-C", content, "-czf", filepath.Join(dir, "gpu-cdi-plugin-"+version+".tgz"), "gpu-cdi-plugin",
	}})
	sumUp(t, dir)
	return dir
}

// sumUp writes SHA256SUMS.
func sumUp(t *testing.T, dir string) {
	t.Helper()
	const script = `rm -f SHA256SUMS; sums=$(sha256sum -- *); echo "$sums" >SHA256SUMS`
	proc.Must(t, 0, proc.Cmd{Args: []string{"sh", "-ec", script}, Dir: dir})
}

// newKeys makes secret keys with the addresses, and returns an environment in which gpg has them and no others.
func newKeys(t *testing.T, addresses ...string) []string {
	t.Helper()
	gpg := testenv.Command(t, "gpg")
	home := t.TempDir()
	testenv.Must(t, os.Chmod(home, 0o700))
	env := append(withoutMake(), "GNUPGHOME="+home)
	t.Cleanup(func() {
		for _, act := range []string{"--kill=all", "--remove-socketdir"} {
			_, err := proc.Run(context.Background(), proc.Cmd{Args: []string{"gpgconf", act}, Env: env})
			testenv.Must(t, err)
		}
	})
	for i, address := range addresses {
		proc.Must(t, 0, proc.Cmd{Env: env, Args: []string{
			gpg, "--batch", "--passphrase", "", "--quick-generate-key", fmt.Sprintf("Key %d <%s>", i, address),
			"rsa2048", "sign", "never",
		}})
	}
	return env
}

// needPublish skips the test where programs of make publish are missing.
func needPublish(t *testing.T) {
	t.Helper()
	for _, name := range []string{"apt-ftparchive", "createrepo_c", "gpg", "gpg-agent", "rpmsign"} {
		testenv.Command(t, name)
	}
}

// files returns the files below a directory with their checksums.
func files(t *testing.T, dir string) map[string]string {
	t.Helper()
	found := map[string]string{}
	testenv.Must(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			found[strings.TrimPrefix(path, dir+"/")] = fmt.Sprintf("%x", sha256.Sum256(readFile(t, path)))
		}
		return err
	}))
	return found
}

// TestSlowPublishRefuses compares a published directory before and after it was refused, or broke off.
func TestSlowPublishRefuses(t *testing.T) {
	needPublish(t)
	root, err := suite.Root()
	testenv.Must(t, err)
	env := newKeys(t, "releases@example.com", "other@example.com", "twice@example.com", "twice@example.com")
	parent := t.TempDir()
	dir, first, next := filepath.Join(parent, "www"), smallRelease(t, "1.0.0"), smallRelease(t, "1.1.0")
	const key = "releases@example.com"
	proc.Must(t, 0, proc.Cmd{Args: []string{"scripts/publish", first, dir, key}, Dir: root, Env: env})
	before := files(t, parent)

	changed := smallRelease(t, "1.1.0")
	testenv.Must(t, os.WriteFile(filepath.Join(changed, "gpu-cdi-plugin-1.1.0.tgz"), nil, 0o644))
	again := smallRelease(t, "1.0.0")
	testenv.Must(t, os.WriteFile(filepath.Join(again, "gpu-cdi-plugin_1.0.0.yaml"), []byte("# changed\n"), 0o644))
	sumUp(t, again)
	foreign := t.TempDir()
	testenv.Must(t, os.WriteFile(filepath.Join(foreign, "index.html"), nil, 0o644))
	failing, unexchanged := t.TempDir(), t.TempDir()
	testenv.WriteProgram(t, filepath.Join(failing, "createrepo_c"), []byte("#!/bin/sh\necho no space >&2\nexit 1\n"))
	// It builds a tools/dist that does not exchange the directories.
	testenv.WriteProgram(t, filepath.Join(unexchanged, "go"), []byte(`#!/bin/sh
`+testenv.Command(t, "go")+` "$@" && mv "$5" "$5.real" && cat >"$5" <<'END' && chmod +x "$5"
#!/bin/sh
[ "$1" != exchange ] || { echo no exchange >&2 && exit 1; }
exec "$0.real" "$@"
END
`))

	for name, c := range map[string]struct {
		dist, dir, key string
		path           string // a directory with programs that come before those of the machine
		want           string
	}{
		"no directory":                     {next, "", key, "", "make publish DIR=DIRECTORY KEY=KEY"},
		"no key":                           {next, dir, "", "", "a release is signed: run make publish DIR="},
		"a key that gpg does not have":     {next, dir, "nobody@example.com", "", "gpg has no secret key nobody@example.com"},
		"an address with several keys":     {next, dir, "twice@example.com", "", "twice@example.com names several keys"},
		"another key than that of before":  {next, dir, "other@example.com", "", dir + " is signed with the key "},
		"no release":                       {t.TempDir(), dir, key, "", "has no release, or several: run make dist"},
		"a release with a changed file":    {changed, dir, key, "", changed + " are not those of SHA256SUMS"},
		"other files of the same version":  {again, dir, key, "", dir + " has another 1.0.0 already"},
		"a directory with other files":     {next, foreign, key, "", foreign + " has other files"},
		"a program that fails on half way": {next, dir, key, failing, "no space"},
		"the last step fails":              {next, dir, key, unexchanged, "no exchange"},
	} {
		t.Run(name, func(t *testing.T) {
			env := env
			if c.path != "" {
				env = append(slices.Clip(env), "PATH="+c.path+":"+os.Getenv("PATH"))
			}
			r := proc.Must(t, 1, proc.Cmd{Args: []string{"scripts/publish", c.dist, c.dir, c.key}, Dir: root, Env: env})
			if !strings.Contains(r.Stderr, c.want) {
				t.Errorf("want %q, got %v", c.want, r)
			}
			if diff := cmp.Diff(before, files(t, parent)); diff != "" {
				t.Errorf("-before +after:\n%s", diff)
			}
			if _, err := os.Stat(dir + ".new"); err == nil {
				t.Errorf("%s.new is left", dir)
			}
		})
	}
	t.Run("two at the same time", func(t *testing.T) {
		testenv.Must(t, os.Mkdir(dir+".new", 0o755))
		r := proc.Must(t, 1, proc.Cmd{Args: []string{"scripts/publish", next, dir, key}, Dir: root, Env: env})
		if want := dir + ".new cannot be made. If it exists, another make publish runs"; !strings.Contains(r.Stderr, want) {
			t.Errorf("want %q, got %v", want, r)
		}
		testenv.Must(t, os.Remove(dir+".new"))
	})
}

// TestSlowPublishKeepsEarlierReleases publishes two versions, and the second one twice.
func TestSlowPublishKeepsEarlierReleases(t *testing.T) {
	needPublish(t)
	root, err := suite.Root()
	testenv.Must(t, err)
	env := newKeys(t, "releases@example.com")
	dir := filepath.Join(t.TempDir(), "missing", "www")
	publish := func(dist string) proc.Result {
		t.Helper()
		return proc.Must(t, 0, proc.Cmd{
			Args: []string{"scripts/publish", dist, dir, "releases@example.com"}, Dir: root, Env: env,
		})
	}
	publish(smallRelease(t, "1.0.0"))
	before := files(t, filepath.Join(dir, "releases"))
	testenv.Must(t, os.WriteFile(filepath.Join(dir, "index.html"), nil, 0o644))
	const preview = "1.1.0-3.g0123456789ab"
	next := smallRelease(t, preview)
	if r := publish(next); !strings.Contains(r.Stderr, "version "+preview+", which is no release") {
		t.Errorf("the version is not named: %v", r)
	}
	published := files(t, filepath.Join(dir, "releases"))
	publish(next)

	after := files(t, filepath.Join(dir, "releases"))
	if diff := cmp.Diff(published, after); diff != "" {
		t.Errorf("the second time (-before +after):\n%s", diff)
	}
	maps.DeleteFunc(after, func(name, _ string) bool { return !strings.HasPrefix(name, "1.0.0/") })
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("the earlier release (-before +after):\n%s", diff)
	}
	readFile(t, dir, "index.html")
	index := string(readFile(t, dir, "dists/stable/main/binary-amd64/Packages"))
	for _, want := range []string{"\nVersion: 1.0.0\n", "\nVersion: 1.1.0~3.g0123456789ab\n"} {
		if strings.Count(index, want) != 1 {
			t.Errorf("apt has not one %q:\n%s", want, index)
		}
	}
	for _, layout := range []string{"image", "chart"} {
		var index struct {
			Manifests []struct{ Annotations map[string]string }
		}
		testenv.Must(t, json.Unmarshal(readFile(t, dir, "oci", layout, "index.json"), &index))
		var tags []string
		for _, m := range index.Manifests {
			tags = append(tags, m.Annotations["org.opencontainers.image.ref.name"])
		}
		if diff := cmp.Diff([]string{"1.0.0", preview}, tags); diff != "" {
			t.Errorf("tags of the layout %s (-want +got):\n%s", layout, diff)
		}
	}
}

// newRegistry starts Debian's registry with the certificate of a web server, and returns its address.
func newRegistry(t *testing.T, certificate tls.Certificate) string {
	t.Helper()
	dir := t.TempDir()
	key, err := x509.MarshalPKCS8PrivateKey(certificate.PrivateKey)
	testenv.Must(t, err)
	config := fmt.Sprintf(`version: 0.1
storage: {filesystem: {rootdirectory: %[1]s/data}}
http: {addr: "127.0.0.1:0", tls: {certificate: %[1]s/cert.pem, key: %[1]s/key.pem}}
`, dir)
	output, err := os.Create(filepath.Join(dir, "log"))
	testenv.Must(t, err,
		os.WriteFile(filepath.Join(dir, "cert.pem"), encode("CERTIFICATE", certificate.Certificate[0]), 0o644),
		os.WriteFile(filepath.Join(dir, "key.pem"), encode("PRIVATE KEY", key), 0o600),
		os.WriteFile(filepath.Join(dir, "config.yml"), []byte(config), 0o644))
	defer output.Close()
	registry, err := proc.Start(proc.Cmd{
		Args: []string{testenv.Command(t, "docker-registry"), "serve", filepath.Join(dir, "config.yml")},
		Env:  append(os.Environ(), "OTEL_TRACES_EXPORTER=none"),
	}, output)
	testenv.Must(t, err)
	t.Cleanup(func() { testenv.Must(t, registry.Kill()) })
	listening := regexp.MustCompile(`listening on (127\.0\.0\.1:\d+), tls`)
	var found []string
	testenv.Eventually(t, "the registry listens", func() bool {
		log := string(readFile(t, dir, "log"))
		select {
		case <-registry.Done():
			t.Fatalf("the registry ended: %s", log)
		default:
		}
		found = listening.FindStringSubmatch(log)
		return found != nil
	})
	return found[1]
}

func encode(kind string, data []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: data})
}

// TestSlowTheReleaseIsPublished publishes the release of a tagged tree by the commands of docs/releasing.md, and
// installs it by those of README.md: the packages in a throw-away root that knows no other repository.
func TestSlowTheReleaseIsPublished(t *testing.T) {
	needPublish(t)
	for _, name := range []string{"curl", "dnf", "podman", "skopeo"} {
		testenv.Command(t, name)
	}
	dir, work := emptyRoot(t), filepath.Join(t.TempDir(), "www")
	web := httptest.NewTLSServer(http.FileServer(http.Dir(work)))
	defer web.Close()
	registry := newRegistry(t, web.TLS.Certificates[0])
	srv := filepath.Join(dir, "files/srv")
	ca := filepath.Join(srv, "ca.pem")
	testenv.Must(t, os.WriteFile(ca, encode("CERTIFICATE", web.Certificate().Raw), 0o644))
	address := []string{"URL=" + web.URL, "REGISTRY=" + registry, "VERSION=" + number}
	helmDir, err := filepath.Abs(filepath.Dir(shared.NodePeer(t, "helm")))
	testenv.Must(t, err)
	home := t.TempDir()
	env := append(newKeys(t, "releases@example.com"), "DIR="+work, "KEY=releases@example.com", "SSL_CERT_FILE="+ca,
		"HELM_CONFIG_HOME="+home, "HELM_CACHE_HOME="+home, "PATH="+os.Getenv("PATH")+":"+helmDir)
	env = append(env, address...)

	made := guide.BlocksByHeading(t, "docs/releasing.md")
	proc.Must(t, 0, proc.Cmd{Args: []string{"sh", "-ec", made["Publish"]}, Dir: taggedTree(t), Env: env})
	proc.Must(t, 0, proc.Cmd{Args: []string{"sh", "-ec", made["Into a registry"]}, Dir: "/", Env: env})

	_, digests, _ := strings.Cut(guide.Read(t, "docs/install.md"), "```\nskopeo ")
	digests, _, _ = strings.Cut("skopeo "+digests, "```")
	compared := proc.Must(t, 0, proc.Cmd{
		Args: []string{"sh", "-ec", digests}, Dir: filepath.Join(work, "releases", number), Env: env,
	})
	if sums := strings.Fields(compared.Stdout); len(sums) != 4 || !slices.Equal(sums[:2], sums[2:]) {
		t.Errorf("the image in the registry is not that of the release: %v", compared)
	}

	scripts := map[string]string{"check": guide.BlocksByHeading(t, "docs/install.md")["Check a download"]}
	for _, block := range guide.Under(t, "README.md", "Install from a repository") {
		for _, name := range []string{"apt install", "dnf install", "helm install", "podman pull"} {
			if strings.Contains(block, name) {
				scripts[strings.Fields(name)[0]] = block
			}
		}
	}
	for _, name := range []string{"check", "apt", "dnf", "helm", "podman"} {
		if scripts[name] == "" {
			t.Fatalf("a guide has no commands with %s", name)
		}
		testenv.Must(t, os.WriteFile(filepath.Join(srv, name+".sh"), []byte(scripts[name]), 0o644))
	}

	// There is no cluster. What Helm does in one, with the chart of the tree, the tests in test/cluster show.
	install := strings.Replace(scripts["helm"], "helm install", "helm install --dry-run=client", 1)
	chart := proc.Must(t, 0, proc.Cmd{Args: []string{"sh", "-ec", install}, Dir: "/", Env: env})
	if want := `image: "` + registry + "/gpu-cdi-plugin:" + number + `"`; !strings.Contains(chart.Stdout, want) {
		t.Errorf("the chart has no %s:\n%s", want, chart.Stdout)
	}

	// What is installed on a host whose distribution has rpm.
	newPackage(t, srv+"/", "rpm", "base", "1", "provides: [/bin/sh, glibc = 2.34]\n")
	testenv.Must(t, os.WriteFile(filepath.Join(srv, "address"), []byte(strings.Join(address, "\n")+"\n"), 0o644))
	boot(t, dir, "repositories.sh")
}

package manager

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/manager/dialect"
	"gpu-cdi-plugin/test/manager/behaviour"
)

func TestTheManagerBehavesAsTheCasesSay(t *testing.T) {
	t.Parallel()
	behaviour.Test(t, behaviour.Subject{Name: "ours", New: New(dialect.Dialect{})})
}

func TestTheDialectsBehaveAsTheKubelet(t *testing.T) {
	t.Parallel()
	for _, name := range dialect.Names() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			behaviour.Test(t, behaviour.Subject{
				Name: "ours as the kubelet", New: New(named(t, name)), Release: release(name), Dialect: true,
				Lacks: map[string]string{
					"a running pod is admitted again after a restart, before its plugin is back": "the manager knows its " +
						"pods: it is as a kubelet that has heard of them all",
				},
			})
		})
	}
}

func named(t *testing.T, name string) dialect.Dialect {
	t.Helper()
	d, err := dialect.New(name)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// release is the kubelet's release that a dialect is named after, as 1.36.
func release(dialect string) string { return strings.TrimPrefix(dialect, "kubelet-") }

var update = flag.Bool("update", false, "write docs/manager-differences.md")

// TestDifferencesAreDocumented keeps the table of the differences equal to the cases.
func TestDifferencesAreDocumented(t *testing.T) {
	const path = "../../docs/manager-differences.md"
	want := differences()
	if *update {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil { //nolint:gosec // a document
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("%s (-want +got; -update writes it):\n%s", path, diff)
	}
}

func differences() string {
	var b strings.Builder
	b.WriteString(`# Where the device manager differs from the kubelet

Each line is a test that runs with the device manager of Kubernetes 1.36.3, with this project's, and with this project's
in the dialects kubelet-1.36 and kubelet-1.37. In all other cases of that suite (` + "`test/manager/behaviour`" +
		`) all do the
same. Where one release is named, the other one does as this manager. Kubernetes 1.37 itself was read, and not run.

| | the kubelet | this manager | with the dialects |
|---|---|---|---|
`)
	for _, c := range behaviour.Cases() {
		if c.Kubelet == "" {
			continue
		}
		dialect := "as the kubelet"
		switch {
		case c.Dialect != "":
			dialect = c.Dialect
		case c.NoDialect != "":
			dialect = "as without: " + c.NoDialect
		}
		kubelet := c.Kubelet
		if c.Releases != nil {
			kubelet = strings.Join(c.Releases, ", ") + ": " + kubelet
		}
		name, fault := c.Name, strings.FieldsFunc(c.Mirrors, func(r rune) bool { return r == ';' })[0]
		if strings.HasPrefix(fault, "B") {
			name += " (" + fault + ")"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", name, kubelet, c.Here, dialect)
	}
	return b.String()
}

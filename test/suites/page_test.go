package suites

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/test/lib/guide"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/suite"
	"gpu-cdi-plugin/test/lib/testenv"
)

// column is a check of engines.
type column struct {
	check, title string
	// problem returns what is wrong with the output of the check on a node, or "".
	problem func(res proc.Result, devices []gpu.Device) string
}

var columns = []column{
	{"devices", "`--device`", func(res proc.Result, all []gpu.Device) string {
		return cmp.Diff(list(all[0])+list(all[len(all)-1])+list(all...), res.Stdout)
	}},
	{"hook", "`hook install`", first},
	{"live", "`hook install live`", first},
	{"try", "`doctor --try`", tried},
	{"lease", "`gpu-run`", leased},
}

func first(res proc.Result, all []gpu.Device) string { return cmp.Diff(list(all[0]), res.Stdout) }

// tried returns the doctor's findings about a try.
func tried(res proc.Result, _ []gpu.Device) string {
	var result struct {
		Findings []struct{ ID, Problem string }
	}
	if err := json.Unmarshal([]byte(res.Stdout), &result); err != nil {
		return err.Error()
	}
	var problem string
	for _, f := range result.Findings {
		if strings.HasPrefix(f.ID, "try-") {
			problem += f.ID + ": " + f.Problem + "\n"
		}
	}
	return problem
}

// leased compares with the list of the only GPU whose UUID is not in the first line.
func leased(res proc.Result, all []gpu.Device) string {
	held, listed, _ := strings.Cut(res.Stdout, "\n")
	free := slices.DeleteFunc(slices.Clone(all), func(d gpu.Device) bool { return strings.Contains(held, d.UUID) })
	if len(free) != 1 {
		return "three GPUs should be held, and not " + held
	}
	return cmp.Diff(list(free...), listed)
}

// row is what was seen of an engine with a runtime.
type row struct {
	suite, engine, runtime string
	missing                string // why it was not run
	versions               map[string]string
	cells                  map[string]string // by check
}

// fields returns the fields of the table.
func (r *row) fields(versions bool) []string {
	name := func(program string) string {
		if program == "" {
			return "-"
		}
		if version := r.versions[program]; versions && version != "" {
			return program + " " + version
		}
		return program
	}
	fields := []string{r.suite, name(r.engine), name(r.runtime)}
	for _, c := range columns {
		switch cell := r.cells[c.check]; {
		case r.missing != "":
			return append(fields, "not run: "+strings.NewReplacer("|", "/", "\t", " ").Replace(r.missing))
		case cell == "":
			fields = append(fields, "-")
		default:
			fields = append(fields, cell)
		}
	}
	return fields
}

const pageName = "docs/engines.md"

// line returns a line of the page's table.
func line(fields []string) string {
	for len(fields) < 3+len(columns) {
		fields = append(fields, "")
	}
	return "| " + strings.Join(fields, " | ") + " |\n"
}

// write replaces the table, which is the end of the page.
func write(t *testing.T, rows []row) {
	t.Helper()
	root, err := suite.Root()
	testenv.Must(t, err)
	head := []string{"suite", "engine", "runtime"}
	for _, c := range columns {
		head = append(head, c.title)
	}
	text, _, _ := strings.Cut(guide.Read(t, pageName), "| suite ")
	text += line(head) + strings.Repeat("|---", len(head)) + "|\n"
	for _, r := range rows {
		text += line(r.fields(true))
	}
	testenv.Must(t, os.WriteFile(filepath.Join(root, pageName), []byte(text), 0o644))
}

// compare compares rows with those of the page, without versions.
func compare(t *testing.T, rows []row) {
	t.Helper()
	has := map[string]bool{}
	for text := range strings.Lines(guide.Read(t, pageName)) {
		fields := strings.Split(strings.Trim(text, "| \n"), " | ")
		for i := 1; i < len(fields) && i < 3; i++ {
			fields[i], _, _ = strings.Cut(fields[i], " ")
		}
		has[line(fields)] = true
	}
	for _, r := range rows {
		if want := line(r.fields(false)); !has[want] {
			t.Errorf("%s lacks the line %q (versions aside): run make test-engines", pageName, want)
		}
	}
}

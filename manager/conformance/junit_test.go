package conformance

import (
	"encoding/xml"
	"strings"
	"testing"
	"time"

	"gpu-cdi-plugin/test/lib/testenv"

	"github.com/google/go-cmp/cmp"
)

// suite is JUnit's XML as a CI system reads it.
type suite struct {
	XMLName  xml.Name   `xml:"testsuite"`
	Name     string     `xml:"name,attr"`
	Tests    int        `xml:"tests,attr"`
	Failures int        `xml:"failures,attr"`
	Skipped  int        `xml:"skipped,attr"`
	Time     string     `xml:"time,attr"`
	Cases    []testCase `xml:"testcase"`
}

type testCase struct {
	Class   string   `xml:"classname,attr"`
	Name    string   `xml:"name,attr"`
	Time    string   `xml:"time,attr"`
	Failure *message `xml:"failure"`
	Skipped *message `xml:"skipped"`
	Output  string   `xml:"system-out"`
}

type message struct {
	Message string `xml:"message,attr"`
	Text    string `xml:",chardata"`
}

func readJUnit(t *testing.T, r *Report) (s suite) {
	t.Helper()
	var written strings.Builder
	testenv.Must(t, r.WriteJUnit(&written))
	if err := xml.Unmarshal([]byte(written.String()), &s); err != nil {
		t.Fatalf("%v\n%s", err, written.String())
	}
	return s
}

func TestJUnitHasAllResults(t *testing.T) {
	must := Rule{ID: "a-must", Says: "It must.", Why: "Or else.", Source: "A book.", Severity: Must}
	should := Rule{ID: "a-should", Says: "It should.", Why: "Or else.", Source: "A book.", Severity: Should}
	r := &Report{}
	r.add(Result{Rule: must, Outcome: Pass, Seen: "it did", Took: time.Second})
	r.add(Result{Rule: must, Outcome: Fail, Seen: "it did not", Took: time.Second / 2})
	r.add(Result{Rule: should, Outcome: Fail, Seen: "it did not"})
	r.add(Result{Rule: should, Outcome: Skipped, Seen: "it is not there"})
	lines := func(says string) string {
		return "expected: " + says + "\nseen:     it did not\nwhy:      Or else.\nsource:   A book."
	}
	want := suite{
		XMLName: xml.Name{Local: "testsuite"}, Name: "device plugin conformance",
		Tests: 4, Failures: 1, Skipped: 1, Time: "1.500",
		Cases: []testCase{
			{Class: "conformance.must", Name: "a-must", Time: "1.000", Output: "it did"},
			{
				Class:   "conformance.must",
				Name:    "a-must",
				Time:    "0.500",
				Failure: &message{"it did not", lines("It must.")},
			},
			{
				Class: "conformance.should", Name: "a-should", Time: "0.000",
				Output: "warning: the plugin breaks this rule\n" + lines("It should."),
			},
			{
				Class:   "conformance.should",
				Name:    "a-should",
				Time:    "0.000",
				Skipped: &message{Message: "it is not there"},
			},
		},
	}
	if diff := cmp.Diff(want, readJUnit(t, r)); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// What a plugin sends is in the texts: it may be anything.
func TestJUnitIsValidXMLWithAnyText(t *testing.T) {
	for seen, want := range map[string]string{
		`<b> & "c" 'd'`:      `<b> & "c" 'd'`,
		"]]> <![CDATA[ -->":  "]]> <![CDATA[ -->",
		"a\nb\tc\rd":         "a\nb\tc\rd",
		"\x00\x01\x1b[31m\v": "\uFFFD\uFFFD\uFFFD[31m\uFFFD",
		"\ufffe\uffff":       "\uFFFD\uFFFD",
		"caf\xe9 \xff":       "caf\uFFFD \uFFFD",
	} {
		for _, result := range []Result{
			{Rule: Rule{Severity: Must}, Outcome: Pass, Seen: seen},
			{Rule: Rule{Severity: Must}, Outcome: Fail, Seen: seen},
			{Rule: Rule{Severity: Should}, Outcome: Skipped, Seen: seen},
		} {
			c := readJUnit(t, &Report{Results: []Result{result}}).Cases[0]
			got := c.Output
			switch result.Outcome {
			case Fail:
				got = c.Failure.Message
			case Skipped:
				got = c.Skipped.Message
			default:
			}
			if got != want {
				t.Errorf("%s: %q is %q, want %q", result.Outcome, seen, got, want)
			}
		}
	}
}

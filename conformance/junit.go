package conformance

import (
	"encoding/xml"
	"fmt"
	"io"
	"time"
)

// suite is JUnit's XML, in the form that CI systems read: github.com/testmoapp/junitxml.
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
	Output  string   `xml:"system-out,omitempty"`
}

type message struct {
	Message string `xml:"message,attr"`
	Text    string `xml:",chardata"`
}

// WriteJUnit writes the report as JUnit's XML. Only rules of severity must are failures: a rule of severity should that
// is broken is a test that passes, with what was seen as its output.
func (r *Report) WriteJUnit(w io.Writer) error {
	s := suite{
		Name: "device plugin conformance", Tests: len(r.Results), Failures: r.Failed, Skipped: r.Skipped,
	}
	var total time.Duration
	for _, result := range r.Results {
		c := testCase{Class: "conformance." + string(result.Severity), Name: result.ID, Time: seconds(result.Took)}
		total += result.Took
		switch {
		case result.Outcome == Skipped:
			c.Skipped = &message{Message: result.Seen}
		case result.Outcome == Fail && result.Severity == Must:
			c.Failure = &message{result.Seen, result.Says + "\n" + result.Why}
		case result.Outcome == Fail:
			c.Output = "warning: " + result.Seen + "\n" + result.Says + "\n" + result.Why
		default:
			c.Output = result.Seen
		}
		s.Cases = append(s.Cases, c)
	}
	s.Time = seconds(total)
	if _, err := io.WriteString(w, xml.Header); err != nil {
		return err
	}
	e := xml.NewEncoder(w)
	e.Indent("", "  ")
	if err := e.Encode(s); err != nil {
		return err
	}
	_, err := io.WriteString(w, "\n")
	return err
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.3f", d.Seconds()) }

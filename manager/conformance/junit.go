package conformance

import (
	"encoding/xml"
	"fmt"
	"io"
	"strings"
	"time"
)

// WriteJUnit writes the report as JUnit XML in the form that CI systems read (github.com/testmoapp/junitxml). Only
// broken rules of severity "must" are failures. A broken rule of severity "should" is a passed test whose output is a
// warning. Characters that XML does not allow, such as control characters in a plugin's texts, are replaced.
func (r *Report) WriteJUnit(w io.Writer) error {
	var cases strings.Builder
	var total time.Duration
	for _, result := range r.Results {
		fmt.Fprintf(&cases, "  <testcase classname=\"conformance.%s\" name=\"%s\" time=\"%s\">%s</testcase>\n",
			result.Severity, escape(result.ID), seconds(result.Took), outcomeElement(result))
		total += result.Took
	}
	_, err := fmt.Fprintf(w, xml.Header+"<testsuite name=\"device plugin conformance\" tests=\"%d\" failures=\"%d\" "+
		"skipped=\"%d\" time=\"%s\">\n%s</testsuite>\n",
		len(r.Results), r.Failed, r.Skipped, seconds(total), cases.String())
	return err
}

// outcomeElement returns the XML element that shows the outcome of a test case.
func outcomeElement(r Result) string {
	seen, all := escape(r.Seen), escape(r.Explanation())
	switch {
	case r.Outcome == Skipped:
		return `<skipped message="` + seen + `"/>`
	case r.Outcome == Fail && r.Severity == Must:
		return `<failure message="` + seen + `">` + all + `</failure>`
	case r.Outcome == Fail:
		return `<system-out>warning: the plugin breaks this rule&#xA;` + all + `</system-out>`
	}
	return `<system-out>` + seen + `</system-out>`
}

// escape escapes a text for attributes and element content.
func escape(text string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(text)) // a strings.Builder returns no errors
	return b.String()
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.3f", d.Seconds()) }

package docs

import "embed"

// Pages are the pages that the admin port serves under /docs/: an operator reads those of the release that runs.
//
//go:embed *.md howto/*.md tutorial/*.md adr/*.md plots/*.svg
var Pages embed.FS

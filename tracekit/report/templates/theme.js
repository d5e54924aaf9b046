try {
  const theme = localStorage.getItem("tracekit-theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch (error) { /* storage is closed to some local files: the system's theme stays */ }
